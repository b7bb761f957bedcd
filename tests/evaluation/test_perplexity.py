"""Perplexity by position against loops written out by hand."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from triadic.data import open_store
from triadic.evaluation import loading, perplexity, scoring
from triadic.evaluation.config import ModelConfig, SuiteConfig
from triadic.evaluation.documents import Documents, Window, full_windows, open_documents
from triadic.evaluation.journal import Journal
from triadic.evaluation.suite import Context
from triadic.settings import SettingsError, from_dict

WINDOW = 96
BUCKETS = [0, 16, 40, WINDOW]


def suite(data, **perplexity_settings) -> SuiteConfig:
    section = {"window": WINDOW, "buckets": BUCKETS, "curve_points": 8} | perplexity_settings
    tree = {"name": "test", "perplexity": section, "model": {"batch_size": 3}}
    tree["data"] = {"train": str(data / "train"), "validation": str(data / "validation")}
    return from_dict(SuiteConfig, tree)


def measure(folder, config, output):
    context = Context(loading.load_checkpoint(str(folder), config.model), config, Journal(output, {}))
    return perplexity.measure(context, config.perplexity)


def by_hand(folder, data, window=WINDOW):
    """Losses [windows, window] in float64 from whole logits, window by window, and the document of each."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    store = open_store(data / "validation")
    stream = torch.from_numpy(store.tokens(0, store.num_tokens).astype(np.int64))
    edges = [*store.starts(0, store.num_tokens).tolist(), store.num_tokens]
    losses, owners = [], []
    for document in range(len(edges) - 1):
        at = edges[document]
        while at + window + 1 <= edges[document + 1]:
            tokens = stream[at : at + window + 1]
            with torch.no_grad():
                logits = model(tokens[None, :-1]).logits[0].double()
            losses.append([-logits[t].log_softmax(-1)[tokens[t + 1]].item() for t in range(window)])
            owners.append(document)
            at += window
    return np.array(losses), np.array(owners)


def test_equals_a_loop_over_whole_logits(hf_folder, data, tmp_path):
    rows = measure(hf_folder, suite(data), tmp_path)
    losses, owners = by_hand(hf_folder, data)
    assert len(owners) > len(set(owners)) > 2
    found = [row for row in rows if row["metric"] == "perplexity"]
    assert [row["position"] for row in found] == [[0, 16], [16, 40], [40, 96]]
    for row in found:
        low, high = row["position"]
        assert row["value"] == pytest.approx(math.exp(losses[:, low:high].mean()), rel=1e-6)
        assert row["tokens_scored"] == losses[:, low:high].size
        assert (row["windows"], row["documents"]) == (len(owners), len(set(owners)))
    heldout = next(row for row in rows if row["metric"] == "heldout_loss")
    assert heldout["value"] == pytest.approx(losses.mean(), rel=1e-6)
    curve = [row for row in rows if row["metric"] == "loss_by_position"]
    assert [curve[0]["position"][0], curve[-1]["position"][1]] == [0, WINDOW]
    for row in curve:
        low, high = row["position"]
        assert row["value"] == pytest.approx(losses[:, low:high].mean(), rel=1e-6)


def test_standard_errors_are_over_documents(llama, data, tmp_path):
    rows = measure(llama, suite(data), tmp_path)
    losses, owners = by_hand(llama, data)

    def clustered(values):
        total = 0.0
        for owner in set(owners):
            total += sum(values[i] - values.mean() for i in range(len(values)) if owners[i] == owner) ** 2
        groups = len(set(owners))
        return math.sqrt(groups / (groups - 1) * total) / len(values)

    first, last = losses[:, :16].mean(1), losses[:, 40:].mean(1)
    row = next(row for row in rows if row["metric"] == "context_gain")
    assert row["value"] == pytest.approx((first - last).mean(), rel=1e-5)
    assert row["se"] == pytest.approx(clustered(first - last), rel=1e-5)
    bucket = next(row for row in rows if row["metric"] == "perplexity")
    assert bucket["loss_se"] == pytest.approx(clustered(first), rel=1e-5)
    assert bucket["loss_minus_last_se"] == pytest.approx(row["se"])
    assert bucket["se"] == pytest.approx(clustered(first) * math.exp(first.mean()), rel=1e-5)


def test_one_window_a_document_gives_the_usual_standard_error():
    values = np.random.default_rng(0).normal(size=13)
    mean, se = perplexity.clustered_mean(values, np.arange(13))
    assert mean == pytest.approx(values.mean())
    assert se == pytest.approx(values.std(ddof=1) / math.sqrt(13))
    assert perplexity.clustered_mean(values, np.zeros(13))[1] is None


def test_zero_head_gives_the_vocabulary_size(silent, data, tmp_path):
    rows = measure(silent, suite(data), tmp_path)
    for row in rows:
        if row["metric"] == "perplexity":
            assert row["value"] == pytest.approx(512, rel=1e-6)
            assert row["se"] == pytest.approx(0, abs=1e-4)


def test_unigram_equals_a_direct_count(llama, data, tmp_path):
    rows = measure(llama, suite(data), tmp_path)
    train = open_store(data / "train")
    tokens = train.tokens(0, train.num_tokens).tolist()
    counts = {token: tokens.count(token) for token in set(tokens) if token != train.bos}
    total = sum(counts.values())
    held = open_store(data / "validation")
    edges = [*held.starts(0, held.num_tokens).tolist(), held.num_tokens]
    losses = []
    for start, stop in itertools.pairwise(edges):
        document = held.tokens(start, stop).tolist()
        scored = document[1 : 1 + (len(document) - 1) // WINDOW * WINDOW]
        losses += [-math.log((counts.get(token, 0) + 1) / (total + 512)) for token in scored]
    unigram = next(row for row in rows if row["metric"] == "unigram_loss")
    assert unigram["value"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert unigram["tokens_scored"] == len(losses)
    values = {row["metric"]: row["value"] for row in rows}
    assert values["gain_over_unigram"] == pytest.approx(values["unigram_loss"] - values["heldout_loss"])


def test_a_window_needs_the_token_after_it():
    documents = Documents([192, 193, 96, 97, 10], None, "")
    assert full_windows(documents, 96) == [Window(0, 0), Window(1, 0), Window(1, 96), Window(3, 0)]
    with pytest.raises(ValueError, match=r"has the 98 tokens of a full window \(the longest has 97\); lower"):
        full_windows(Documents([97], None, ""), 97)


def test_windows_of_a_document(data, tokenizer):
    documents = open_documents(data / "validation", tokenizer)
    windows = full_windows(documents, WINDOW)
    counted = [sum(w.document == d for w in windows) for d in range(len(documents.lengths))]
    assert counted == [(length - 1) // WINDOW for length in documents.lengths]
    assert all(w.start % WINDOW == 0 for w in windows)
    few = full_windows(documents, WINDOW, most=3)
    assert few == [windows[0], windows[len(windows) // 3], windows[2 * len(windows) // 3]]
    with pytest.raises(ValueError, match="no held-out document has the 100001 tokens"):
        full_windows(documents, 100_000)


def test_text_files_are_read_as_the_store_was_made(texts, data, tokenizer):
    """Same ids: BOS, text, EOS."""
    store = open_store(data / "validation")
    edges = [*store.starts(0, store.num_tokens).tolist(), store.num_tokens]
    stored = {tuple(store.tokens(a, b).tolist()) for a, b in itertools.pairwise(edges)}
    documents = open_documents(texts, tokenizer)
    assert len(documents.lengths) == 12
    read = {tuple(documents.read(i, 0, length).tolist()) for i, length in enumerate(documents.lengths)}
    assert stored < read


def test_documents_from_jsonl_and_parquet(tmp_path, tokenizer):
    import json

    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"page": text}) + "\n" for text in ("kalo mi", "ter")))
    pyarrow.parquet.write_table(pyarrow.table({"page": ["kalo mi", "ter"]}), tmp_path / "b.parquet")
    one = open_documents(tmp_path / "a.jsonl", tokenizer, "page")
    two = open_documents(tmp_path / "b.parquet", tokenizer, "page")
    expected = [1, *tokenizer.encode("kalo mi", add_special_tokens=False), 2]
    assert one.read(0, 0, 99).tolist() == two.read(0, 0, 99).tolist() == expected
    assert len(open_documents(tmp_path, tokenizer, "page").lengths) == 4
    with pytest.raises(ValueError, match="has no column 'text', only page"):
        open_documents(tmp_path / "a.jsonl", tokenizer)
    with pytest.raises(ValueError, match="there are no documents at"):
        open_documents(tmp_path / "missing", tokenizer)


def test_baseline_is_measured_on_the_same_windows(llama, silent, data, tmp_path):
    rows = measure(llama, suite(data, baseline=str(silent), unigram=False), tmp_path)
    other = [row for row in rows if row.get("model") == str(silent)]
    assert [row["value"] for row in other if row["metric"] == "perplexity"] == pytest.approx([512] * 3, rel=1e-6)
    assert [row for row in rows if "model" not in row and row["metric"] == "perplexity"]


def test_a_baseline_that_cannot_be_compared_is_refused_before_anything_is_measured(llama, tokenizer, data, tmp_path):
    def check(baseline):
        config = suite(data, baseline=str(baseline), unigram=False)
        context = Context(loading.load_checkpoint(str(llama)), config, Journal(tmp_path / "out", {}))
        return perplexity.check(context, config.perplexity)

    small = GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_positions=64, n_embd=16, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=2)
    )
    small.save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match=r"window is 96 tokens, but .*short takes at most 64"):
        check(tmp_path / "short")
    shutil.copytree(llama, tmp_path / "other")
    words = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    words["added_tokens"].append(words["added_tokens"][0] | {"id": 511, "content": "<new>"})
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match="other has another tokenizer, so perplexities do not compare"):
        check(tmp_path / "other")


def test_a_killed_measurement_goes_on(llama, data, tmp_path, monkeypatch):
    config = suite(data, windows_per_step=4)
    whole = measure(llama, config, tmp_path / "whole")
    calls = []
    score = scoring.token_losses

    def dying(model, ids, targets):
        calls.append(len(ids))
        if sum(calls) > 6:
            raise KeyboardInterrupt
        return score(model, ids, targets)

    monkeypatch.setattr(perplexity, "token_losses", dying)
    with pytest.raises(KeyboardInterrupt):
        measure(llama, config, tmp_path / "killed")
    calls.clear()
    monkeypatch.setattr(perplexity, "token_losses", lambda *a: calls.append(len(a[1])) or score(*a))
    assert measure(llama, config, tmp_path / "killed") == whole
    windows = whole[0]["windows"]
    assert sum(calls) == windows - 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buckets": [0, 16]}, "buckets must rise from 0 to the window"),
        ({"buckets": [0, 40, 16, WINDOW]}, "buckets must rise"),
        ({"window": 0, "buckets": [0]}, "window must be at least 1"),
        ({"windowz": 3}, "did you mean perplexity.window"),
    ],
)
def test_bad_settings(data, settings, message):
    with pytest.raises(SettingsError, match=message):
        suite(data, **settings)


def test_window_beyond_the_model_is_refused(llama, data, tmp_path):
    (tmp_path / "long.txt").write_text("ka lo mi " * 4000)
    config = from_dict(
        SuiteConfig,
        {
            "name": "test",
            "perplexity": {"window": 4096, "buckets": [0, 4096], "unigram": False},
            "data": {"validation": str(tmp_path / "long.txt")},
        },
    )
    context = Context(loading.load_checkpoint(str(llama)), config, Journal(tmp_path / "out", {}))
    with pytest.raises(ValueError, match=r"window is 4096 tokens, but .* takes at most 2048"):
        perplexity.check(context, config.perplexity)


def test_store_of_another_tokenizer_is_refused(llama, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    meta = tmp_path / "data" / "validation" / "store.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"tokenizer_hash": "0" * 64}))
    with pytest.raises(ValueError, match="made with another tokenizer"):
        measure(llama, suite(tmp_path / "data"), tmp_path / "out")


def test_token_losses_in_pieces(llama, monkeypatch):
    """Chunks of three positions give what one chunk gives."""
    model = loading.load_checkpoint(str(llama), ModelConfig()).model
    ids = torch.randint(3, 512, (2, 20))
    whole = scoring.token_losses(model, ids, ids.roll(-1, 1))
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 3 * 512)
    torch.testing.assert_close(scoring.token_losses(model, ids, ids.roll(-1, 1)), whole)


def test_models_that_change_their_logits_are_refused(llama):
    model = AutoModelForCausalLM.from_pretrained(llama)
    scoring.check_head(model)
    head = model.forward

    def capped(*args, **kwargs):
        out = head(*args, **kwargs)
        out.logits = 2 * torch.tanh(out.logits / 2)
        return out

    model.forward = capped
    with pytest.raises(ValueError, match="changes its logits"):
        scoring.check_head(model)


def test_a_cap_in_the_config_is_enough():
    """While logits are small a cap hardly moves them, but it will."""
    sizes = dict(vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    config = Gemma2Config(**sizes, num_key_value_heads=1, head_dim=16, final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM changes its logits"):
        scoring.check_head(Gemma2ForCausalLM(config).eval())
