"""expected.json of each recipe against the paper's numbers, what our configs compute, and the other recipes."""

import json
import re
from pathlib import Path

import pytest

from triadic.models import TriadicConfig, count_parameters, state_bytes

ROOT = Path(__file__).parents[2]
EXPECTED = {path.parent.name: json.loads(path.read_text()) for path in (ROOT / "recipes").glob("*/expected.json")}
TABLES = ("figure2_table1_state_matched", "table2_upcycling", "table3_hybrids", "table4_key_dimensions")
SIZES = dict(zip(TABLES, (21, 12, 5, 8), strict=True))

# sums over a table's rows of the numbers the paper prints, so that one digit changed anywhere shows
SUMS = {
    "figure2_table1_state_matched": {
        "state_mb": 340.2,
        "params_m": 7994.0,
        "zero_shot": 1112.5,
        "wikitext_ppl": 236.98,
        "pg19_le4k": 319.2,
        "pg19_4k_16k": 304.5,
        "pg19_16k_64k": 298.89,
        "recall": 602.9,
    },
    "table2_upcycling": {
        "state_mb": 641.8,
        "params_m": 10534.6,
        "zero_shot": 681.3,
        "wikitext_ppl": 114.99,
        "pg19_le4k": 155.28,
        "pg19_4k_16k": 147.74,
        "pg19_16k_64k": 144.86,
        "recall": 424.3,
    },
    "table3_hybrids": {
        "state_mb_4k": 134,
        "state_mb_64k": 1644,
        "zero_shot": 266.0,
        "wikitext_ppl": 54.35,
        "pg19_le4k": 74.87,
        "pg19_4k_64k": 68.57,
        "recall": 201.3,
        "niah_avg": 230.7,
    },
    "table4_key_dimensions": {
        "state_mb": 402.4,
        "params_m": 3071.0,
        "zero_shot": 425.2,
        "wikitext_ppl": 87.19,
        "pg19_le4k": 118.79,
        "pg19_4k_16k": 112.81,
        "pg19_16k_64k": 110.36,
        "recall": 261.5,
    },
}
# single values that the paper's text repeats
VALUES = [
    ("figure2_table1_state_matched", "gdn", "pg19_16k_64k", 14.15),
    ("figure2_table1_state_matched", "triadic gdn E=2", "pg19_16k_64k", 13.95),
    ("figure2_table1_state_matched", "triadic gdn E=4", "pg19_16k_64k", 13.79),
    ("figure2_table1_state_matched", "gdn", "recall", 26.2),
    ("figure2_table1_state_matched", "triadic gdn E=4", "recall", 31.1),
    ("table2_upcycling", "triadic gdn E=8 400M from scratch", "pg19_16k_64k", 13.74),
    ("table2_upcycling", "triadic gdn E=8 400M from scratch", "recall", 33.1),
    ("table3_hybrids", "hybrid triadic E=4 gqa-8", "niah_avg", 56.3),
    ("table3_hybrids", "hybrid gqa-4", "niah_avg", 53.0),
    ("table4_key_dimensions", "scalar gate d_k=128 E=8", "pg19_16k_64k", 13.7),
    ("figure5_analysis", "triadic gdn E=8", "longest", 1080),
    ("figure5_analysis", "gdn", "shortest", 5.1),
]


def paper_rows(recipe):
    return {name: row for name, row in EXPECTED[recipe]["rows"].items() if row["paper"]}


@pytest.mark.parametrize("recipe", TABLES)
def test_every_row_and_column_is_there(recipe):
    rows = paper_rows(recipe)
    assert len(rows) == SIZES[recipe]
    for row in rows.values():
        assert set(row["paper"]) == set(EXPECTED[recipe]["columns"])


@pytest.mark.parametrize("recipe", TABLES)
def test_sums_of_columns(recipe):
    for column, total in SUMS[recipe].items():
        values = [row["paper"][column] for row in paper_rows(recipe).values()]
        assert sum(v for v in values if not isinstance(v, str)) == pytest.approx(total, abs=1e-6), column


@pytest.mark.parametrize(("recipe", "row", "column", "value"), VALUES)
def test_single_values(recipe, row, column, value):
    assert EXPECTED[recipe]["rows"][row]["paper"][column] == value


def test_a_model_has_the_same_numbers_in_every_table():
    seen = {}
    for recipe in (*TABLES, "figure3_ruler"):
        for row in paper_rows(recipe).values():
            for column, value in row["paper"].items():
                key = (row["models"]["paper"], column)
                if key[0] == "triadic_gdn_400m_e8":  # Tables 2 and 4 print different runs of it
                    continue
                assert seen.setdefault(key, value) == value, key


@pytest.mark.parametrize("recipe", TABLES)
def test_parameters_and_state_follow_from_our_configs(recipe):
    for name, row in paper_rows(recipe).items():
        model = row["models"]["paper"].removesuffix("_upcycled")
        config = TriadicConfig.from_pretrained(ROOT / "configs" / "model" / f"{model}.json")
        paper = row["paper"]
        if "params_m" in paper:
            printed = 1377.6 if paper["params_m"] == 1377.5 else paper["params_m"]  # 1,377,553,408 parameters
            assert round(count_parameters(config)[0] / 1e6, 1) == printed, name
        if isinstance(paper.get("state_mb"), float):
            assert round(state_bytes(config, 4096) / 1e6, 1) == paper["state_mb"], name
        for length in (4, 64):
            if f"state_mb_{length}k" in paper:
                state = state_bytes(config, length * 1024) / 1e6
                assert abs(state - paper[f"state_mb_{length}k"]) < 0.6, name  # 31.46 is printed as 31


HALVED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "linear_num_key_heads")
HALVED += ("linear_num_value_heads",)
KEPT = ("linear_key_head_dim", "linear_value_head_dim", "second_key_dim", "second_key_activation", "tie_second_key")
KEPT += (
    "decay_gate",
    "linear_mixer",
    "write_gate",
    "linear_conv_kernel_dim",
    "position_embedding",
    "num_key_value_heads",
)


def test_small_models_are_the_papers_at_half_width_and_depth():
    pairs = {
        (row["models"]["small"], row["models"]["paper"])
        for expected in EXPECTED.values()
        for row in expected["rows"].values()
        if "small" in row.get("models", {}) and "upcycled" not in row["models"]["small"]
    }
    assert len(pairs) == 26 == len(list((ROOT / "recipes/scales/small/models").glob("*.json")))
    for small, paper in pairs:
        ours = json.loads((ROOT / "recipes/scales/small/models" / f"{small}.json").read_text())
        theirs = json.loads((ROOT / "configs/model" / f"{paper}.json").read_text())
        for name in set(HALVED) & set(theirs):
            assert ours[name] * 2 == theirs[name], (small, name)
        for name in KEPT:
            assert ours.get(name) == theirs.get(name), (small, name)
        assert ours["layer_types"] == theirs["layer_types"][:12]
        assert count_parameters(TriadicConfig(**ours))[0] == pytest.approx(56.2e6, rel=0.025)


@pytest.mark.parametrize("recipe", EXPECTED)
def test_each_readme_says_which_scales_have_no_results(recipe):
    (state,) = re.findall(r"^\*\*State\.\*\* .*$", (ROOT / "recipes" / recipe / "README.md").read_text(), re.MULTILINE)
    for scale in ("small", "paper"):
        table = (ROOT / "recipes" / recipe / "results" / scale / "table.md").read_text()
        measured = ".json`: commit" in table
        assert measured == (re.search(rf"`{scale}`[^.]* not been run", state) is None)
        assert measured or "- No results yet: " in table
