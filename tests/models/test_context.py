"""A window spread over ranks: losses and every gradient equal those of one process; what cannot spread is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triadic.models.context import Context, check_context, spread_context

PROGRAM = Path(__file__).with_name("context_cases.py")
KINDS = 5


def rows(folder, ranks, *arguments):
    command = [sys.executable, PROGRAM]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), folder / "store", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    texts = [process.communicate(timeout=300) for process in started]
    assert all(process.returncode == 0 for process in started), texts[0][1][-3000:]
    return [json.loads(line) for line in texts[0][0].splitlines()]


def judge(found, count, tolerance):
    assert len(found) == count
    for row in found:
        assert abs(row["loss"] - row["expected"]) < tolerance * row["expected"], row
        assert row["worst"] < tolerance, row


def test_two_ranks_equal_one_process(tmp_path):
    judge(rows(tmp_path, 2), KINDS, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--checkpoint",),
        ("--dtype", "float32"),
        ("--compile", "--kinds", "gdn_e8", "gdn_e1", "sgla_tied"),  # softmax on a CPU reads the bounds on the host
    ],
)
def test_four_ranks_equal_one_process(tmp_path, arguments):
    count = 3 if "--compile" in arguments else KINDS
    judge(rows(tmp_path, 4, *arguments), count, 1e-5 if "float32" in arguments else 1e-10)


@pytest.mark.parametrize(
    ("kind", "changes", "degree", "message"),
    [
        ("gdn", {}, 4, "over 4 ranks: linear_num_key_heads is 2; take a divisor of it"),
        ("transformer", {}, 3, "over 3 ranks: num_attention_heads is 4; take a divisor of it"),
        ("hybrid", {"linear_num_key_heads": 1}, 2, "over 2 ranks: linear_num_key_heads is 1"),
        (
            "transformer",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            2,
            "over 2 ranks: num_key_value_heads is 3; take a divisor or a multiple of it",
        ),
    ],
)
def test_heads_that_do_not_spread_are_refused(make_config, kind, changes, degree, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_context(make_config(kind, **changes), degree)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "takes one packed row"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "must rise from 0 to the 10 tokens of the row"),
        ({"cu_seq_lens_q": torch.tensor([0, 10]), "attention_mask": torch.ones(1, 5)}, "no attention_mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 10]), "use_cache": True}, "fills no cache"),
    ],
)
def test_rows_that_are_not_spread_are_refused(make_model, tokens, arguments, message):
    model = make_model("gdn")
    spread_context(model, Context(None, 0, 2))
    with pytest.raises(ValueError, match=re.escape(message)):
        model(tokens(1, 5), **arguments)
