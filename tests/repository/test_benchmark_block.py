"""The benchmark of layers and blocks at its smallest, on a CPU: what it runs and what its rows say, timing aside."""

import importlib.util
import json
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from triadic_kernels import chunk_triadic

from triadic.models import TriadicConfig
from triadic.models.loading import load_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "model"
SMALL = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16, output_gate_rank=8)
HEADS = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)


@pytest.fixture
def program(monkeypatch):
    """scripts/benchmark_block.py on a CPU in float32; every call it would time runs once and takes one ms."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("benchmark_block", ROOT / "scripts" / "benchmark_block.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "DTYPE", torch.float32)
    for name, figure in {"timed": (1.0, 1980), "peak_gib": 1.0, "host_ms": 1.0}.items():
        monkeypatch.setattr(module.bench, name, lambda call, *_, figure=figure, **__: (call(), figure)[1])
    monkeypatch.setattr(module.bench, "need_gpu", lambda: None)
    monkeypatch.setattr(module.bench, "header", lambda *_: {"gpu": "NVIDIA X", "date": "today"})
    return module


@pytest.fixture
def run(program, tmp_path, monkeypatch):
    """run(argument, ...) -> rows of the result file, of models as large as SMALL."""
    small = {}
    for name, changes in (("gdn_1.3b", HEADS), ("transformer_1.3b", {})):
        fields = json.loads((CONFIGS / f"{name}.json").read_text()) | SMALL | changes
        small[name] = tmp_path / f"{name}.json"
        small[name].write_text(json.dumps(fields))

    def call(*arguments):
        out = tmp_path / "out" / "block.json"
        models = ["--linear", small["gdn_1.3b"], "--transformer", small["transformer_1.3b"]]
        command = ["benchmark_block.py", *models, "--B", 2, "--T", 20, "--out", out, *arguments]
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        program.main()
        return json.loads(out.read_text())["rows"]

    return call


def test_rows_of_every_kind(run, program, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fla", None)  # not installed
    rows = run("--E", 1, 2, "--impl", "triadic", "sdpa_flash", "sdpa_cudnn", "fla", "fla_layer")
    ours = [row for row in rows if row["impl"] == "triadic"]
    cells = {(row["what"], row["E"], row["pass"]) for row in ours}
    assert cells == {(what, E, which) for what in ("layer", "block") for E in (1, 2) for which in ("fwd", "fwdbwd")}
    assert all(row["ms"] == row["over_e1"] == row["over_transformer"] == 1.0 for row in ours)
    assert all(row["backend"] == "torch" for row in ours), "the one that ran, on a CPU"
    assert all(row["backend"] is None for row in rows if row not in ours)
    assert all(row["model"] == "gdn_1.3b" and row["H"] == 2 and row["K"] == 16 for row in ours)
    softmax = [row for row in rows if row["impl"] == "sdpa_flash"]
    assert [(row["E"], row["mixer"], "ms" in row) for row in softmax] == [(None, "softmax", True)] * 4
    reasons = {row["impl"]: row["error"] for row in rows if "error" in row}
    assert reasons.keys() == {"sdpa_cudnn", "fla", "fla_layer"}
    assert all("fla" in reasons[impl] for impl in ("fla", "fla_layer"))
    assert "| block (2, 20) triadic E=2 | 1 (1) | 1 (1) | 1.000 |  | 1.000 |" in capsys.readouterr().out


def test_options_reach_the_layers(run, program, monkeypatch):
    compiled, layers, make = [], [], program.make_module

    def noted(*arguments):
        module, model = make(*arguments)
        layers.append(module)
        return module, model

    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(self))
    monkeypatch.setattr(program, "make_module", noted)
    rows = run("--E", 2, "--impl", "triadic", "--compile", "--no-fused-inputs", "--passes", "fwdbwd")
    assert [type(module).__name__ for module in layers] == ["TriadicDecoderLayer", "TriadicLinearAttention"]
    assert compiled == layers
    assert not any(getattr(module, "mixer", module).config.linear_fused_inputs for module in layers)
    assert all(row["compiled"] and not row["fused_inputs"] and row["pass"] == "fwdbwd" for row in rows)


def test_defaults_and_the_rest_reach_the_measurement(run, program, monkeypatch):
    rests = []
    monkeypatch.setattr(program.bench, "timed", lambda call, repeats, rest: (rests.append(rest), (1.0, 1980))[1])
    rows = run("--E", 2, "--impl", "triadic", "--what", "layer")
    run("--E", 2, "--impl", "triadic", "--what", "layer", "--rest", 0)
    assert rests == [0.05] * 2 + [0.0] * 2
    assert all(row["fused_inputs"] and row["rest"] == 0.05 and row["sm_mhz"] == 1980 for row in rows)


def test_what_is_timed(program, demo, monkeypatch):
    """A layer in training; a forward that records no graph, and a backward to the input and to every weight."""
    step, x, parameters = program.make_step("layer", "triadic", 2, 9, demo)
    graphs, wanted, grad = [], [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda y, inputs, dy: (wanted.append(inputs), grad(y, inputs, dy))[1])
    noted = lambda x: (graphs.append((y := step(x)).requires_grad), y)[1]  # noqa: E731
    for which in program.PASSES.values():
        which(noted, x, parameters)
    assert graphs == [False, True]
    assert len(parameters) > 5
    assert [id(y) for y in wanted[0]] == [id(y) for y in (x, *parameters)]
    module, _ = program.make_module("layer", "triadic", program.config_of("triadic", 2, demo))
    assert module.training


def test_only_a_lack_of_memory_is_recorded_of_our_own(run, program, monkeypatch):
    def fail(error):
        def measured(*_):
            raise error

        monkeypatch.setattr(program, "figures", measured)

    case = ("--E", 2, "--what", "layer", "--passes", "fwd", "--impl")
    fail(torch.cuda.OutOfMemoryError("too large"))
    assert "too large" in run(*case, "triadic")[0]["error"]
    fail(RuntimeError("wrong"))
    assert "wrong" in run(*case, "sdpa_flash")[0]["error"]
    with pytest.raises(RuntimeError, match="wrong"):
        run(*case, "triadic")


@pytest.fixture
def demo():
    return types.SimpleNamespace(linear=CONFIGS / "demo.json", fused_inputs=True, compile=False, B=1)


def test_a_peers_op_runs_inside_our_layer(program, demo, monkeypatch):
    """Our own op in the peer's place, once as it is and once doubled; the layer's other parts stay."""
    given = []

    def op(factor, q, k, v, g, beta):
        given.append((g.shape, v.shape[:3], beta.shape))
        return factor * chunk_triadic(q, k, v, g=g, beta=beta)[0], None

    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    outputs = []
    for impl, factor in (("triadic", 1), ("fla", 1), ("fla", -1)):
        sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = partial(op, factor)
        torch.manual_seed(0)
        step, x, _ = program.make_step("layer", impl, 1, 9, demo)
        with program.surroundings(impl), torch.no_grad():
            outputs.append(step(x))
    ours, same, negative = outputs
    torch.testing.assert_close(same, ours, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(negative, -ours, rtol=1e-4, atol=1e-6)
    assert len(given) == 2
    assert all(g == v == beta for g, v, beta in given), "one decay and one strength for each head"


def test_a_peers_layer_stands_in_the_block(program, demo, monkeypatch):
    made = []

    class GatedDeltaNet(nn.Module):
        def __init__(self, hidden_size, **settings):
            super().__init__()
            made.append(settings)
            self.proj = nn.Linear(hidden_size, hidden_size)

        def forward(self, hidden_states):
            return self.proj(hidden_states), None, None

    for name in ("fla", "fla.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fla.layers"].GatedDeltaNet = GatedDeltaNet
    step, x, parameters = program.make_step("block", "fla_layer", 1, 9, demo)
    program.forward_backward(step, x, parameters)
    config = load_config(demo.linear)
    sizes = {name: made[0][name] for name in ("num_heads", "head_dim", "expand_v")}
    K, V = config.linear_key_head_dim, config.linear_value_head_dim
    assert sizes == dict(num_heads=config.linear_num_key_heads, head_dim=K, expand_v=V / K)
    assert sum(p.numel() for p in parameters) == config.hidden_size * (config.hidden_size + 3) + (
        3 * config.hidden_size * config.intermediate_size
    )


@pytest.mark.parametrize("E", [2, 4, 8])
def test_blocks_are_those_of_the_presets(E, program):
    a = types.SimpleNamespace(linear=CONFIGS / "gdn_1.3b.json", fused_inputs=True)
    preset = load_config(CONFIGS / f"triadic_gdn_1.3b_e{E}.json").to_dict()
    preset |= dict(num_hidden_layers=1, layer_types=["linear_attention"], vocab_size=8)
    assert program.config_of("triadic", E, a).to_dict() == TriadicConfig(**preset).to_dict()


def test_rows_of_figure_4_are_among_them(program):
    """What the recipe divides by what, for some choice of options."""
    expected = json.loads((ROOT / "recipes" / "figure4_efficiency" / "expected.json").read_text())
    wanted = [spec[side] for spec in expected["rows"].values() for side in ("where", "over")]
    wanted = [where for where in wanted if where["what"] == "block"]
    assert len(wanted) == 2 * 26
    a = types.SimpleNamespace(
        linear=CONFIGS / "gdn_1.3b.json", transformer=CONFIGS / "transformer_1.3b.json", fused_inputs=True, B=4
    )
    for where in wanted:
        a.compile = where["compiled"]
        row = program.describe("block", where["impl"], where.get("E", 1), where.get("T", 4096), a) | {"pass": "fwdbwd"}
        assert row | where == row


def test_ratios_are_taken_among_like_rows(program):
    common = {"what": "block", "B": 4, "T": 4096, "pass": "fwdbwd", "compiled": False}
    measured = [("triadic", 1, 10.0), ("triadic", 8, 12.0), ("flashqla", 1, 8.0), ("fla", 1, 9.0)]
    measured += [("sdpa_flash", None, 24.0), ("sdpa_cudnn", None, 20.0), ("flex_attention", None, 6.0)]
    rows = [common | {"impl": impl, "E": E, "ms": ms} for impl, E, ms in measured]
    others = [rows[1] | {"compiled": True, "ms": 6.0}, rows[4] | {"T": 8192, "ms": 1.0}]
    failed = common | {"impl": "triadic", "E": 16, "error": "OutOfMemoryError"}
    program.compare([*rows, *others, failed])
    ratios = [[row.get(name) for name in program.OVER] for row in (*rows[:3], *others, failed)]
    assert ratios == [
        [1.0, 1.25, 0.5], [1.2, 1.5, 0.6], [None] * 3,
        [None] * 3, [None] * 3, [None] * 3,
    ]  # fmt: skip


def test_without_a_gpu_it_says_so(program, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmark_block.py", "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="times kernels on a CUDA device"):
        program.main()
    assert not list(tmp_path.iterdir())
