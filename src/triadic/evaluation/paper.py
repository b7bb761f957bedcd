"""The paper's tables: their rows, and in what an evaluation was measured otherwise than their figures.

The paper does not say how it cuts recall texts or which NQ set it takes; there configs/eval/all.yaml decides.
"""

import json
from pathlib import Path, PurePath
from typing import Any

TABLES = Path(__file__).parent / "paper_tables.json"
PG19 = "pg19"  # configs/data/pg19.yaml writes its held-out books to data/pg19/validation
SETTINGS = {  # part of a suite -> its settings that a figure of the paper's tables needs
    "perplexity": {"window": 65_536, "max_windows": None},
    "wikitext": {"path": None, "detokenize": True},
    "zeroshot": {
        "metrics": {
            "lambada_openai": "acc",
            "hellaswag": "acc_norm",
            "piqa": "acc",
            "arc_easy": "acc",
            "arc_challenge": "acc_norm",
            "winogrande": "acc",
            "openbookqa": "acc_norm",
            "sciq": "acc",
            "boolq": "acc",
            "copa": "acc",
        },
        "folder": None,
        "samples": None,
    },
    "recall": {
        "tasks": ["fda", "swde", "squad", "nq", "triviaqa", "drop"],
        "context_length": 2000,
        "centre": "answer",
        "nq": 2048,
        "folder": None,
        "samples": None,
    },
    "ruler": {
        "tasks": [
            *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"),
            *("niah_multikey_3", "niah_multivalue", "niah_multiquery"),
        ],
        "lengths": [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536],
        "samples": 500,
        "essays": None,
        "haystack": None,
    },
}
UNSET = {"samples": "all", "max_windows": "all"}  # what null means; elsewhere: the hub's own data


def rows(names: list[str]) -> dict[str, dict[str, float | str]]:
    """Rows of the paper's tables by name, TABLE/ROW where several tables have one of that name.

    TABLE is a table's name (table1_state_matched) or its begin (table1). Raises ValueError for a name that fits no row,
    or several.
    """
    tables = {name: table for name, table in json.loads(TABLES.read_text()).items() if isinstance(table, dict)}
    every = [(name, row) for name, table in tables.items() for row in table]
    chosen = {}
    for name in names:
        fits = [(t, row) for t, row in every if name in (row, f"{t}/{row}", f"{_short(t)}/{row}")]
        if not fits:
            known = ", ".join(f"{_short(t)}/{row}" for t, row in every)
            raise ValueError(f"the paper's tables have no row {name!r}; they have {known}")
        if len(fits) > 1:
            choices = " or ".join(f"{_short(t)}/{row}" for t, row in fits)
            raise ValueError(f"several of the paper's tables have a row {name!r}; give {choices}")
        table, row = fits[0]
        chosen[f"paper: {name}"] = tables[table][row]
    return chosen


def _short(table: str) -> str:
    return table.split("_", 1)[0]


def differs(results: dict[str, Any], part: str) -> list[str]:
    """In what a part of a results.json was measured otherwise than the paper's figure: one phrase for each setting."""
    section = results["suite"].get(part) or {}
    found = []
    if part == "perplexity" and (name := local_text(results, part)):
        found.append(f"the text is {name}, not PG19")
    for key, wanted in SETTINGS[part].items():
        given = section.get(key)
        if not _equal(given, wanted):
            found.append(f"{part}.{key} is {_said(key, given)}, not {_said(key, wanted)}")
    return found


def local_text(results: dict[str, Any], part: str) -> str | None:
    """The text of "perplexity" or "wikitext" where it is not PG19 or WikiText-2: its path, as the suite gives it.

    PG19 is known by its folder's name alone, that of configs/data/pg19.yaml.
    """
    suite = results["suite"]
    if part == "wikitext":
        return suite["wikitext"]["path"] if suite.get("wikitext") else None
    path = suite["data"]["validation"]
    if path is None:
        return "the run's own validation text"
    return None if PG19 in PurePath(path).parts else path


def _equal(given: Any, wanted: Any) -> bool:
    if isinstance(given, list) and isinstance(wanted, list):
        return sorted(given) == sorted(wanted)
    return given == wanted


def _said(key: str, value: Any) -> str:
    if value is None:
        return UNSET.get(key, "the hub's data")
    if isinstance(value, dict):
        return ", ".join(f"{name}: {metric}" for name, metric in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
