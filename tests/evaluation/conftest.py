"""Invented text, a tokenizer trained on it, its token stores, and tiny random models saved like any checkpoint."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from triadic import TriadicConfig, TriadicForCausalLM
from triadic.data import prepare
from triadic.data.config import DataConfig
from triadic.settings import from_dict

FOLLOW = {  # the needle task's own words, so that they are few tokens
    "grass": "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "ask": "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards. What is the special magic number for mentioned in the "
    "provided text?",
}


def invent(seed: int, words: int) -> str:
    """Sentences of made-up words that lean on a few favourites, so that context helps and words repeat."""
    rng = random.Random(seed)
    syllables = ["ka", "lo", "mi", "ter", "su", "no", "ra", "vel", "pi", "don"]
    favourites = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(20)]
    text = []
    for number in range(words):
        text.append(rng.choice(favourites))
        if number % 9 == 8:
            text[-1] += "."
    return " ".join(text) + "\n" + FOLLOW["grass"] + "\n" + FOLLOW["ask"] + "\n"


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """Twelve text files of different lengths."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(12):
        (folder / f"{number:02d}.txt").write_text(invent(number, 100 + 30 * number))
    return folder


@pytest.fixture(scope="session")
def data(texts, tmp_path_factory) -> Path:
    """tokenizer/, train/ and validation/ made of the texts."""
    config = {
        "output": str(tmp_path_factory.mktemp("data") / "invented"),
        "tokenizer": {"train": {"vocab_size": 512}},
        "source": {"files": [str(texts / "*.txt")], "validation": {"documents": 4, "min_characters": 1500}},
        "workers": 1,
    }
    return Path(prepare(from_dict(DataConfig, config)))


@pytest.fixture(scope="session")
def tokenizer(data):
    return AutoTokenizer.from_pretrained(data / "tokenizer")


def save(model, data: Path, folder: Path) -> Path:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(data, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return save(LlamaForCausalLM(config), data, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def triadic_hf(data, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = TriadicConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        second_key_dim=3, output_gate_rank=8, pad_token_id=0, initializer_range=0.2, max_position_embeddings=256,
    )  # fmt: skip
    return save(TriadicForCausalLM(config), data, tmp_path_factory.mktemp("triadic"))


@pytest.fixture(scope="session", params=["llama", "triadic_hf"])
def hf_folder(request) -> Path:
    """Each of the two models in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def run_folder(data, triadic_hf, tmp_path_factory) -> Path:
    """A training run's folder with one finished model, as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    (folder / "final").parent.mkdir(parents=True)
    for file in triadic_hf.iterdir():
        (folder / "final").mkdir(exist_ok=True)
        (folder / "final" / file.name).write_bytes(file.read_bytes())
    (folder / "run.yaml").write_text(
        f"data: {{train: {data}/train, validation: {data}/validation}}\n"
        "batch: {global_batch_tokens: 4096}\nrun: {steps: 50, seed: 7}\n"
    )
    return folder


@pytest.fixture(scope="session")
def silent(llama, data, tmp_path_factory) -> Path:
    """A Llama whose output projection is zero: every next token is equally likely."""
    model = AutoModelForCausalLM.from_pretrained(llama)
    torch.nn.init.zeros_(model.lm_head.weight)
    return save(model, data, tmp_path_factory.mktemp("silent"))
