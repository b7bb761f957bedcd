"""A checkpoint is found under every name it may be given, and refused in one sentence otherwise."""

import hashlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, Qwen3Config

from triadic import TriadicConfig
from triadic.evaluation import loading
from triadic.evaluation.config import ModelConfig


@pytest.fixture
def run(tmp_path, llama):
    """A run with two complete checkpoints and an unfinished third."""
    for step, done in ((10, True), (20, True), (30, False)):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        shutil.copytree(llama, folder / "hf")
        if done:
            (folder / "done.json").write_text("{}")
    (tmp_path / "run" / "run.yaml").write_text(
        "data: {train: data/t, validation: data/v}\nbatch: {global_batch_tokens: 100}\nrun: {steps: 30, seed: 3}\n"
    )
    return tmp_path / "run"


def test_names_of_a_checkpoint(run, llama):
    assert loading.find_checkpoint(str(llama)) == llama
    newest = run / "checkpoints" / "step-00000020"
    assert loading.find_checkpoint(str(run)) == newest / "hf"
    assert loading.find_checkpoint(str(newest)) == newest / "hf"
    assert loading.find_checkpoint(str(newest / "hf")) == newest / "hf"
    shutil.copytree(llama, run / "final")
    assert loading.find_checkpoint(str(run)) == run / "final"


def test_what_a_run_says_of_its_checkpoints(run, llama):
    facts = {"train": "data/t", "validation": "data/v", "seed": 3}
    assert loading.run_facts(run / "checkpoints" / "step-00000020" / "hf") == facts | {"tokens": 2000}
    assert loading.run_facts(run / "final") == facts | {"tokens": 3000}
    assert loading.run_facts(llama) == {}
    for content in (b"- a", b"data: {train: x}", b"{", b"\xff"):
        (run / "run.yaml").write_bytes(content)
        with pytest.raises(ValueError, match=r"run\.yaml is damaged, or no run's settings; restore or remove it"):
            loading.run_facts(run / "final")


@pytest.mark.parametrize("name", ["/no/such/folder", "./no/such", "no/such/folder", "../x"])
def test_missing_folders(name):
    with pytest.raises(
        ValueError, match=f"there is no folder {name}; give a Hugging Face folder, a run folder or a hub id"
    ):
        loading.find_checkpoint(name)


def test_unreachable_hub(monkeypatch):
    def refuse(*_, **__):
        raise OSError("no\nnetwork.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(
        ValueError, match=r"no folder runs/absent here, and the hub gives no model of that name \(no network\)"
    ):
        loading.find_checkpoint("runs/absent")


def test_a_hub_id_is_fetched(monkeypatch, llama):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"some/model": str(llama)}[name])
    assert loading.find_checkpoint("some/model") == llama


def test_folders_without_a_model(tmp_path, llama, run):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"neither a Hugging Face folder .* nor a run folder"):
        loading.find_checkpoint(str(tmp_path / "empty"))
    for done in run.glob("checkpoints/*/done.json"):
        done.unlink()
    with pytest.raises(ValueError, match="no complete checkpoint: none of its 3"):
        loading.find_checkpoint(str(run))
    shutil.copytree(llama, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="weights in other formats are not loaded"):
        loading.find_checkpoint(str(tmp_path / "pickled"))


def test_loaded_for_evaluation(llama):
    found = loading.load_checkpoint(str(llama), ModelConfig(dtype="bfloat16"))
    assert found.model.dtype == torch.bfloat16
    assert not found.model.training
    assert not any(p.requires_grad for p in found.model.parameters())
    on_cpu = loading.load_checkpoint(str(llama), ModelConfig(device="cpu"))
    assert on_cpu.model.dtype == torch.float32
    inner = hashlib.sha256((llama / "model.safetensors").read_bytes()).digest()
    assert on_cpu.weights_hash == hashlib.sha256(inner).hexdigest()
    assert on_cpu.facts()["parameters"] == sum(p.numel() for p in on_cpu.model.parameters())


def test_broken_tokenizers(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "bare")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded from .*bare"):
        loading.load_checkpoint(str(tmp_path / "bare"))
    (tmp_path / "bare" / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded from .*bare: 'added_tokens'"):
        loading.load_checkpoint(str(tmp_path / "bare"))


NAME = "model.layers.0.mlp.up_proj.weight"
HURT = {
    "missing": (lambda weights: weights.pop(NAME), f"do not fit the model's config; missing: {NAME}"),
    "shape": (lambda weights: weights.update({NAME: torch.ones(3, 3)}), f"config; of another shape: {NAME}"),
    "not a number": (lambda weights: weights[NAME].fill_(torch.nan), "gives logits that are not finite"),
}


@pytest.mark.parametrize("how", HURT)
def test_weights_that_are_not_the_models(llama, tmp_path, how):
    hurt, message = HURT[how]
    shutil.copytree(llama, tmp_path / "hurt")
    weights = load_file(llama / "model.safetensors")
    hurt(weights)
    save_file(weights, tmp_path / "hurt" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        loading.load_checkpoint(str(tmp_path / "hurt"))


def test_torn_weights_and_devices_that_are_not_there(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"torn cannot be loaded: Error while deserializing header"):
        loading.load_checkpoint(str(tmp_path / "torn"))
    with pytest.raises(ValueError, match=r"model\.device abacus cannot be used"):
        loading.load_checkpoint(str(llama), ModelConfig(device="abacus"))


def test_a_tokenizer_larger_than_the_model(llama, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    larger = AutoTokenizer.from_pretrained(tmp_path)
    larger.add_tokens(["<new>"])
    larger.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the tokenizer has 513 tokens, but the model .* only 512"):
        loading.load_checkpoint(str(llama), ModelConfig(tokenizer=str(tmp_path)))


def test_a_model_that_caps_its_logits(data, tmp_path):
    config = Gemma2Config(
        vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, final_logit_softcapping=0.5, initializer_range=1.0,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM changes its logits after the output projection"):
        loading.load_checkpoint(str(tmp_path))


def test_position_limits():
    limits = {"max_position_embeddings": 100}
    assert loading.position_limit(LlamaConfig(**limits)) == 100
    assert loading.position_limit(Qwen3Config(**limits)) == 100
    assert loading.position_limit(TriadicConfig(num_hidden_layers=2, **limits)) is None
    mixed = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    assert loading.position_limit(TriadicConfig(**mixed, **limits)) == 100
    assert loading.position_limit(TriadicConfig(**mixed, **limits, position_embedding="none")) is None


def test_a_recurrent_mixer_that_was_added_has_no_position_limit(monkeypatch):
    config = LlamaConfig(max_position_embeddings=100)
    config.layer_types = ["linear_attention", "another"]
    assert loading.position_limit(config) == 100
    monkeypatch.setattr(loading, "RECURRENT", ("linear_attention", "another"))
    assert loading.position_limit(config) is None
