"""Invented text, a tokenizer trained on it, its token stores, and tiny random models saved like any checkpoint."""

import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
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

FOUR = {"text": ["ka lo", "mi ter", "su", "no ra"], "label": ["A", "B", "C", "D"]}
ROWS = {  # task -> three documents
    "lambada_openai": [{"text": f"ka lo mi ter su no {word}"} for word in ("ra", "vel", "don")],
    "hellaswag": [
        {
            "activity_label": "Ka",
            "ctx_a": "mi ter.",
            "ctx_b": "su no",
            "endings": ["ka ka.", "lo [title] mi.", "ter.", "su no ra."],
            "label": str(i),
        }
        for i in range(3)
    ],
    "piqa": [{"goal": "ka lo mi", "sol1": f"ter su {i}", "sol2": "no", "label": i % 2} for i in range(3)],
    "arc_easy": [{"question": "ka?", "choices": FOUR, "answerKey": "ABCD"[i]} for i in range(3)],
    "arc_challenge": [{"question": "lo?", "choices": FOUR, "answerKey": "DCBA"[i]} for i in range(3)],
    "winogrande": [
        {"sentence": "ka lo _ mi ter", "option1": "no", "option2": "ra vel", "answer": str(1 + i % 2)} for i in range(3)
    ],
    "openbookqa": [{"question_stem": "mi lo", "choices": FOUR, "answerKey": "ABCD"[i]} for i in range(3)],
    "sciq": [
        {
            "question": "ka lo?",
            "distractor1": "mi",
            "distractor2": "ter",
            "distractor3": "su",
            "correct_answer": "no ra",
            "support": f" vel {i} pi",
        }
        for i in range(3)
    ],
    "boolq": [{"question": "ka lo", "passage": "mi ter su.", "label": i % 2} for i in range(3)],
    "copa": [
        {
            "premise": "Ka lo mi.",
            "choice1": "Ter su.",
            "choice2": "No ra.",
            "question": ("cause", "effect")[i % 2],
            "label": i % 2,
        }
        for i in range(3)
    ],
}
PAGES = [
    "= Ka = \n ka lo , mi ter su . \n It 's a @-@ b ( c ) . \n",
    "= Lo = \n no ra vel pi don ka lo ; mi . \n" * 3,
    "",
]


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


@pytest.fixture(scope="session")
def local(tmp_path_factory) -> Path:
    """The ten zero-shot tasks, nine as JSON lines and one as Parquet."""
    folder = tmp_path_factory.mktemp("zeroshot")
    write_tasks(folder, ROWS, parquet="sciq")
    return folder


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("wikitext") / "test.jsonl"
    file.write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    return file


@pytest.fixture(scope="session")
def recall_row():
    """A document whose answer stands in the middle of many words: (task, number) -> row."""
    return make_recall_row


@pytest.fixture(scope="session")
def recall_files(tmp_path_factory) -> Path:
    """The six recall tasks, five as JSON lines and one as Parquet."""
    folder = tmp_path_factory.mktemp("recall")
    tasks = ("fda", "swde", "squad", "nq", "triviaqa", "drop")
    write_tasks(folder, {task: [make_recall_row(task, n) for n in range(3)] for task in tasks}, parquet="drop")
    return folder


@pytest.fixture(scope="session")
def own(tmp_path_factory) -> Path:
    """A haystack of one's own: two documents of short sentences."""
    folder = tmp_path_factory.mktemp("own-haystack")
    for name, word in (("a", "green"), ("b", "yellow")):
        (folder / f"{name}.txt").write_text("".join(f"{word} sky {i}.\n" for i in range(400)))
    return folder


def write_tasks(folder: Path, tasks: dict[str, list[dict]], parquet: str) -> None:
    """TASK.jsonl for each task, one of them as Parquet."""
    for task, rows in tasks.items():
        if task == parquet:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{task}.parquet")
        else:
            (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_recall_row(task: str, number: int) -> dict:
    """One invented document, with the columns of its data set."""
    hay = "ka lo mi ter su no ra vel pi don " * 30
    answer = ["kamisu", "lovel tera", "Rapi"][number % 3]
    facts = f"{hay}the word is {answer} {hay}"
    if task in ("fda", "swde"):
        text = facts + ("Summary of information above... the word is wrong" if task == "swde" else "the word:")
        return {"doc_id": number, "file_name": "a.txt", "key": "the word", "value": answer, "text": text}
    if task == "squad":
        text = f" {facts}\nThe word is \n"
        return {"doc_id": str(number), "text": text, "value": answer, "title": "t", "context": facts, "question": "?"}
    asked = {"question": "The word is ", "orig_question": "What is the word?", "answers": ["nowhere", answer]}
    return {"doc_id": str(number), "context": f" {facts}. [DOC] [TLE] the word is"} | asked
