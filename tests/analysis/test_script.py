"""scripts/analyse.py on two checkpoint folders and a text file."""

import json
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from triadic.analysis import AnalysisConfig, analyse
from triadic.models.conversion import convert_family
from triadic.models.families import FAMILIES
from triadic.models.upcycling import upcycle

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "analyse.py")
SETTINGS = "window: 32\nwindows: 1\nrank_positions: [32]\ntail: 8\ncontexts: [4, 16]\ntail_documents: 2\n"


@pytest.fixture
def folder(make_model, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(53)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, slices in (("gdn", 1), ("e4", 4)):
        make_model(second_key_dim=slices).save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", pad_token="w0", unk_token="w3"
        ).save_pretrained(tmp_path / name)
    for i in range(3):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(f"w{(i * 7 + j * j) % 53}" for j in range(60)))
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    return tmp_path


@pytest.fixture
def run(monkeypatch, folder):
    def call(*words):
        options = ["--config", folder / "settings.yaml", "--output", folder / "out"]
        monkeypatch.setattr("sys.argv", ["analyse.py", *map(str, [*words, *options])])
        runpy.run_path(SCRIPT, run_name="__main__")

    return call


def test_models_stand_side_by_side_in_results_table_and_figure(run, folder, capsys):
    names = [str(folder / "gdn"), str(folder / "e4")]
    run(*names, f"data={folder / 'text'}", "contexts=[4]")
    results = json.loads((folder / "out" / "results.json").read_text())
    assert {"commit", "date", "gpu", "versions", "command", "settings", "rows"} <= results.keys()
    ranks = {
        name: [r["rank"] for r in results["rows"] if r["metric"] == "half_life" and r["model"] == name]
        for name in names
    }
    assert ranks == {names[0]: [1], names[1]: [1, 2, 3, 4]}
    assert [r["context"] for r in results["rows"] if r["metric"] == "tail_loss"] == [4, 4]
    assert (folder / "out" / "figure.png").is_file()
    assert (folder / "out" / "table.md").read_text() in capsys.readouterr().out


def test_any_checkpoint_shows_what_it_has(run, folder, make_model):
    """Our mixers in the place of Qwen3-Next's have gates and states, its own and a Llama's have the use of context."""
    source = FAMILIES["qwen3_next"].source
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    linear |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "linear_value_head_dim": 8}
    kinds = {"layer_types": ["full_attention", "linear_attention"], "shared_expert_intermediate_size": 8}
    torch.manual_seed(0)
    own = source(source.config_class(**sizes, **linear, **kinds))
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
    same = convert_family(own)
    made = {"own": own, "llama": llama, "same": same, "wide": upcycle(same, 4)}
    for name, model in made.items():
        model.save_pretrained(folder / name)
        for file in (folder / "e4").glob("tokenizer*"):
            (folder / name / file.name).write_bytes(file.read_bytes())
    run(*(folder / name for name in made), f"data={folder / 'text'}")
    rows = json.loads((folder / "out" / "results.json").read_text())["rows"]
    shown = {name: [row for row in rows if row["model"] == str(folder / name)] for name in made}
    for name in ("own", "llama"):
        assert {row["metric"] for row in shown[name]} == {"tail_loss"}
    assert {row["metric"] for row in shown["wide"]} > {"tail_loss", "half_life", "beta_mean", "state_rank"}
    assert {row["layer"] for row in rows if "layer" in row} == {1}
    assert [row["rank"] for row in shown["wide"] if row["metric"] == "half_life"] == [1, 2, 3, 4]
    losses = [[row["value"] for row in shown[n] if row["metric"] == "tail_loss"] for n in ("own", "same")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    tokenizer, expected = PreTrainedTokenizerFast.from_pretrained(folder / "e4"), []
    for number in (0, 1):  # of three documents two, evenly spaced
        text = (folder / "text" / f"{number}.txt").read_text()
        ids = torch.tensor([[1, *tokenizer(text, add_special_tokens=False).input_ids, 2]])[:, -12:]
        with torch.no_grad():
            logits = llama(ids).logits[0, 3:11]
        expected.append(torch.nn.functional.cross_entropy(logits, ids[0, 4:]).item())
    assert shown["llama"][0]["value"] == pytest.approx(sum(expected) / 2, rel=1e-5)


def test_what_cannot_be_analysed_or_written_is_told_in_a_sentence(run, folder):
    with pytest.raises(SystemExit, match=r"^error: there is no checkpoint to analyse; name a"):
        run(f"data={folder / 'text'}")
    (folder / "out").touch()
    with pytest.raises(SystemExit, match=r"^error: .*out is no folder; name another --output$"):
        run(folder / "gdn", f"data={folder / 'text'}")
    (folder / "out").unlink()
    (folder / "out" / "figure.png").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"^error: .*figure.png"):
        run(folder / "gdn", f"data={folder / 'text'}")


def test_a_stores_read_only_tokens_are_taken_without_a_warning(make_model):
    documents = np.arange(120).reshape(2, 60) % 53
    documents.setflags(write=False)
    config = AnalysisConfig(window=32, windows=1, rank_positions=[], tail=8, contexts=[4], tail_documents=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = analyse(make_model(), [60, 60], lambda i, start, stop: documents[i, start:stop], config)
    assert {row["metric"] for row in rows} >= {"half_life", "tail_loss"}


def test_a_model_outside_a_run_needs_its_text_named(run, folder):
    with pytest.raises(SystemExit, match="give data=PATH"):
        run(folder / "gdn")
