"""Loss on the last tokens against the same loss from whole logits, the choice of documents, tables and figures."""

import pytest
import torch

from triadic.analysis import AnalysisConfig, analyse, draw, tail_loss, write_table
from triadic.analysis.suite import choose


@pytest.fixture
def documents(tokens):
    return [tokens(n, seed=n) for n in (90, 40, 75, 120)]


def read_from(documents):
    return lambda index, start, stop: documents[index][start:stop].numpy()


def test_tail_loss_is_the_loss_on_the_last_tokens_after_that_context(make_model, documents):
    model, lengths = make_model(), [len(d) for d in documents]
    rows = tail_loss(model, lengths, read_from(documents), [1, 10, 50], 20, [0, 2, 3])
    for row, context in zip(rows, [1, 10, 50], strict=True):
        losses = []
        for index in (0, 2, 3):
            ids = documents[index][-(20 + context) :]
            logits = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            nll = -logits[torch.arange(len(ids) - 1), ids[1:]]
            losses.append(nll[-20:].mean().item())
        spread = torch.tensor(losses).std().item() / 3**0.5
        assert row["context"] == context
        assert row["value"] == pytest.approx(sum(losses) / 3, rel=1e-5)
        assert row["se"] == pytest.approx(spread, rel=1e-4)
        assert (row["tail"], row["documents"]) == (20, 3)


def test_short_documents_are_refused(make_model, documents):
    lengths = [len(d) for d in documents]
    with pytest.raises(ValueError, match="1 of 2 documents are shorter than the 70 tokens"):
        tail_loss(make_model(), lengths, read_from(documents), [50], 20, [0, 1])
    with pytest.raises(ValueError, match="no document has 200 tokens \\(the longest has 120\\)"):
        choose(lengths, 200, 3)


def test_documents_are_chosen_evenly_among_long_ones():
    assert choose([5, 50, 60, 10, 70, 80, 90, 55], 50, 3) == [1, 4, 6]
    assert choose([5, 50, 60], 50, 10) == [1, 2]


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_every_analysis_of_a_model_and_its_table_and_figure(kind, make_model, documents, tmp_path):
    config = AnalysisConfig(window=32, windows=2, rank_positions=[8, 32], tail=16, contexts=[4, 16], tail_documents=2)
    model = make_model(layer_types=[kind] * 2)
    rows = analyse(model, [len(d) for d in documents], read_from(documents), config)
    linear = {"half_life", "beta_mean", "beta_histogram", "state_rank"} if kind == "linear_attention" else set()
    found = {row["metric"] for row in rows}
    assert {metric for metric in found if not metric.endswith("_by_layer")} == linear | {"tail_loss"}
    named = [{"model": "tiny"} | row for row in rows]
    text = write_table(named, tmp_path / "table.md")
    value = next(row["value"] for row in rows if row["metric"] == "tail_loss" and row["context"] == 16)
    assert f"| tiny | 16 | {value:.4g}" in text
    assert draw(named, tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "at least 1"),
        ({"contexts": []}, "numbers of tokens"),
        ({"contexts": [0, 16]}, "1 or more"),
        ({"window": 100}, "must lie in the window"),
    ],
)
def test_settings_that_cannot_be_used(changes, message):
    with pytest.raises(ValueError, match=message):
        AnalysisConfig(**changes)
