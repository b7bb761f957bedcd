"""The recall task and model against their definition, the grid's program, and a run that learns."""

import concurrent.futures
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from triadic import settings
from triadic.evaluation import mqar

RECIPE = Path(__file__).parents[2] / "recipes" / "figure1_mqar"
TINY = mqar.MqarConfig(
    pairs=8, slices=4, keys=32, values=32, embedding_size=32, hidden_size=64, intermediate_size=64, heads=2,
    head_dim=4, steps=140, tokens_per_step=1024, learning_rate=5e-3, warmup_steps=20, test_sequences=100,
    precision="fp32", growth_from=2, growth_steps=16,
)  # fmt: skip
ESCAPE = dataclasses.replace(  # from pairs=16 on it stays on the plateau for long
    TINY, pairs=16, keys=32, values=32, embedding_size=16, hidden_size=32, intermediate_size=32, heads=4,
    tokens_per_step=512, warmup_steps=10, growth_steps=30, max_sequences=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("mqar_run", RECIPE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = mqar.MqarModel(dataclasses.replace(TINY, slices=3)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def draw(sequences=3, pairs=8, seed=0):
    return mqar.draw(TINY, pairs, sequences, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("slices", "total", "ratio"), [(1, 3.51, 1.0), (16, 3.54, 1.08)])
def test_parameters_are_the_papers(slices, total, ratio):
    config = mqar.MqarConfig(slices=slices)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in mqar.MqarModel(config).parameters())
    assert round(count / 1e6, 2) == total
    outside = count - 16_384 * (64 + 128)
    assert outside == mqar.count_non_embedding(config)
    base = mqar.count_non_embedding(mqar.MqarConfig(slices=1))
    assert round(outside / base, 2) == ratio


def test_a_sequence_asks_every_key_once_and_the_answer_stood_beside_it():
    keys, values, queries, answers = draw(sequences=200)
    assert keys.max() < TINY.keys <= values.min()
    assert values.max() < TINY.keys + TINY.values
    for k, v, q, a in zip(*(x.tolist() for x in (keys, values, queries, answers)), strict=True):
        assert len(set(k)) == 8
        assert sorted(q) == sorted(k)
        assert [dict(zip(k, v, strict=True))[key] for key in q] == a
    assert not torch.equal(keys, queries)
    counts = torch.bincount(keys.flatten(), minlength=TINY.keys)  # 1600 draws of 32 keys: 50 +- 7 each
    assert counts.min() > 20
    assert counts.max() < 90


def test_model_is_the_plain_recurrence(model):
    """Two layers written token by token: S_e += k2_e k v^T at pairs, nothing at queries; RMSNorm on the read-out."""
    keys, values, queries, _ = draw()
    weights = dict(model.named_parameters())
    heads, size, slices = 2, 4, 3

    def norm(x, weight):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    embed = weights["decoder.embed_tokens.weight"]
    pair = torch.cat([embed[keys], embed[values]], dim=-1)
    asked = torch.cat([embed[queries], torch.zeros_like(embed[queries])], dim=-1)
    x = torch.cat([pair, asked], dim=1)
    for i in range(2):
        w = {n.split(f"layers.{i}.")[1]: p for n, p in weights.items() if f"layers.{i}." in n}
        u = norm(x, w["input_layernorm.weight"]) @ w["mixer.in_proj_qkv.weight"].T
        q, k, v, q2, k2 = u.split([heads * size] * 3 + [heads * slices] * 2, dim=-1)
        q, k, v, q2, k2 = (t.unflatten(-1, (heads, -1)) for t in (q, k, v, q2, k2))
        state = x.new_zeros(len(x), heads, slices, size, size)
        reads = []
        for t in range(x.shape[1]):
            if t < x.shape[1] // 2:
                state = state + torch.einsum("bhe,bhk,bhv->bhekv", k2[:, t], k[:, t], v[:, t])
            reads.append(torch.einsum("bhe,bhk,bhekv->bhv", q2[:, t], q[:, t], state) / math.sqrt(size))
        o = norm(torch.stack(reads, 1), w["mixer.o_norm.weight"]).flatten(2)
        x = x + o @ w["mixer.o_proj.weight"].T
        u = norm(x, w["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(u @ w["mlp.gate_proj.weight"].T)
        x = x + (gate * (u @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    expected = norm(x, weights["decoder.norm.weight"])[:, 8:]
    torch.testing.assert_close(model(keys, values, queries), expected, rtol=1e-9, atol=1e-9)


def test_queries_do_not_hear_each_other(model):
    keys, values, queries, _ = draw()
    permuted = model(keys, values, queries.flip(1)).flip(1)
    torch.testing.assert_close(permuted, model(keys, values, queries), rtol=1e-9, atol=1e-9)


def test_loss_and_accuracy_span_the_whole_vocabulary(model):
    batch = draw()
    logits = model.head(model(*batch[:3]))
    assert logits.shape == (3, 8, TINY.keys + TINY.values)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[3].flatten())
    torch.testing.assert_close(model.loss(*batch), expected, rtol=1e-9, atol=1e-9)


def test_n_grows_by_doubling_once_the_plateau_is_left():
    config = dataclasses.replace(TINY, pairs=16, growth_from=2, growth_steps=30)
    assert {mqar.pairs_at(config, step, None) for step in range(TINY.steps)} == {2}
    assert [mqar.pairs_at(config, step, 50) for step in (50, 59, 60, 69, 70, 99)] == [4, 4, 8, 8, 16, 16]
    odd = dataclasses.replace(config, pairs=12)
    assert [mqar.pairs_at(odd, step, 0) for step in (0, 10, 20, 30)] == [4, 8, 12, 12]
    for constant in (dataclasses.replace(config, growth_steps=0), dataclasses.replace(config, pairs=2)):
        assert {mqar.pairs_at(constant, step, left) for step in range(50) for left in (None, 0)} == {constant.pairs}


def learns(seed, steps, **changes):
    """A row of ESCAPE, and N and loss of each twentieth of its steps."""
    log = []
    return mqar.train(dataclasses.replace(ESCAPE, seed=seed, steps=steps, **changes), on_log=log.append), log


def test_few_pairs_first_leave_the_plateau_where_all_at_once_stay():
    row, log = learns(0, 120)
    assert row["left"] < 100
    assert row["value"] > 0.25
    assert {entry["pairs"] for entry in log if entry["step"] <= row["left"]} == {2}
    assert log[-1]["pairs"] == 16
    assert all(entry["loss"] > math.log(2) for entry in log if entry["step"] <= row["left"] - mqar.LOOK)
    stuck, _ = learns(0, 120, growth_steps=0)
    assert stuck["left"] is None
    assert stuck["value"] < 0.1


@pytest.mark.parametrize(("steps", "left", "looks"), [(50, 40, 2), (37, 37, 2), (32, None, 2), (20, None, 1)])
def test_the_plateau_is_left_at_the_next_look(steps, left, looks, monkeypatch):
    """Looking waits for a GPU, so it is done every twentieth step, and no more once a loss was low: here the 33rd."""
    drawn, looked, draw = [], [], mqar.draw

    class Least(float):
        def item(self):
            looked.append(self)
            return self

    def loss(model, *batch):
        return model.head.weight.sum() * 0 + (0.1 if len(drawn) == 33 else 5.0)

    monkeypatch.setattr(mqar.MqarModel, "loss", loss)
    monkeypatch.setattr(mqar, "draw", lambda *a: drawn.append(a[1]) or draw(*a))
    monkeypatch.setattr(mqar.torch, "fmin", lambda least, x: Least(min(least, x)))
    row, _ = learns(0, steps, test_sequences=1)
    assert row["left"] == left
    assert len(looked) == looks
    assert drawn[:steps] == [2] * min(steps, left or steps) + [4] * (steps - (left or steps))


def test_a_matched_start_has_the_same_queries_as_keys_and_learns_all_pairs_at_once():
    for matched in (False, True):
        torch.manual_seed(0)
        for layer in mqar.MqarModel(dataclasses.replace(TINY, matched_start=matched)).decoder.layers:
            q, k, v, q2, k2 = layer.mixer.in_proj_qkv.weight.split([8] * 5)  # two heads of 4, and of 4 slices
            assert torch.equal(q, k) == torch.equal(q2, k2) == matched
            assert not torch.equal(v, k)
    assert learns(0, 100, growth_steps=0, matched_start=True)[0]["value"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_seed_leaves_the_plateau(seed):
    row, _ = learns(seed, 200)
    assert row["left"] < 130
    assert row["value"] > 0.5
    assert learns(seed, 100, matched_start=True)[0]["value"] > 0.8
    assert learns(seed, 200, growth_steps=0)[0]["value"] < 0.2


def test_short_sequences_are_not_more_than_allowed(monkeypatch):
    drawn = []
    original = mqar.draw
    monkeypatch.setattr(mqar, "draw", lambda *a: drawn.append(a[1:3]) or original(*a))
    row, _ = learns(0, 2, max_sequences=50, test_sequences=1)
    assert drawn[:2] == [(2, 50)] * 2
    assert row["tokens"] == 2 * 50 * 4
    row, _ = learns(0, 2, max_sequences=None, test_sequences=1)
    assert row["tokens"] == 2 * ESCAPE.tokens_per_step, "unasked, a step of two pairs has as many tokens as any other"
    assert mqar.MqarConfig().max_sequences is None


def test_learning_rate_warms_up_and_ends_at_zero():
    factors = [mqar.learning_rate_factor(TINY, step) for step in range(TINY.steps + 1)]
    assert factors[0] == pytest.approx(1 / 20)
    assert max(factors) == factors[20] == 1.0
    assert factors[80] == pytest.approx(0.5)
    assert factors[-1] == pytest.approx(0.0)


def test_capacity_is_where_the_curve_crosses_one_half():
    assert mqar.capacity({32: 1.0, 64: 0.75, 128: 0.25, 256: 0.0}) == pytest.approx(64 * math.sqrt(2))
    assert mqar.capacity({32: 1.0, 64: 0.9}) is None
    assert mqar.capacity({32: 0.2, 64: 0.1}) is None


def test_summary_gives_capacity_and_gain_for_each_e():
    rows = [
        {"metric": "accuracy", "E": e, "N": n, "seed": s, "value": min(1.0, 32 * e / n) ** 2}
        for e in (1, 2, 4)
        for n in (32, 64, 128, 256)
        for s in (0, 1)
    ]
    found = {(row["metric"], row["E"]): row["value"] for row in mqar.summarize(rows, mqar.MqarTraining())}
    assert found["capacity", 2] == pytest.approx(2 * found["capacity", 1])
    assert found["capacity_gain", 4] == pytest.approx(2.0)
    assert ("capacity_gain", 1) not in found
    assert found["params_m", 1] == pytest.approx(3.51, abs=0.005)


def test_a_larger_state_recalls_more():
    """Trained alike on twelve pairs, four slices of 4 x 4 in two heads hold them and one slice does not."""
    task = dataclasses.replace(TINY, pairs=12, steps=70, growth_steps=0, matched_start=True)
    large = mqar.train(task)["value"]
    small = mqar.train(dataclasses.replace(task, slices=1))["value"]
    assert large > 0.8
    assert small < 0.65


def test_program_fills_a_grid_and_goes_on_where_it_stopped(program, tmp_path):
    grid = settings.load(program.Grid, RECIPE / "smoke.yaml")
    output = tmp_path / "mqar.json"
    first = program.run(dataclasses.replace(grid, slices=[1], pairs=[2]), output, "test")
    assert [row["E"] for row in first["rows"] if row["metric"] == "accuracy"] == [1]
    kept = json.loads(output.read_text())["rows"][0]
    assert first["command"] == "test"
    assert first["versions"]["torch"] == importlib.metadata.version("torch")
    assert first["device"] == f"CPU, {torch.get_num_threads()} threads" or first["gpu"]
    whole = program.run(dataclasses.replace(grid, pairs=[2]), output, "test")
    accuracy = [row for row in whole["rows"] if row["metric"] == "accuracy"]
    assert accuracy[0] == kept
    assert [(row["N"], row["E"]) for row in accuracy] == [(2, 1), (2, 2)]
    other = dataclasses.replace(grid, training=dataclasses.replace(grid.training, steps=4))
    with pytest.raises(ValueError, match="another configuration"):
        program.run(other, output, "test")


def test_grids_and_outputs_that_cannot_be_are_refused(program, tmp_path):
    grid = settings.load(program.Grid, RECIPE / "smoke.yaml")
    for changes in ({"pairs": []}, {"slices": [1, 1]}, {"pairs": [0, 2]}):
        with pytest.raises(ValueError, match=r"must be different numbers of at least 1, one or more of them, not \["):
            dataclasses.replace(grid, **changes)
    for content in ("[]", "{}", "{"):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError, match=r"other.json is no result file of this program; name another --output"):
            program.run(grid, tmp_path / "other.json", "test")
    with pytest.raises(ValueError, match="is no result file of this program"):
        program.run(grid, tmp_path, "test")
    with pytest.raises(ValueError, match=r"other.json/mqar.json cannot be written"):
        program.run(dataclasses.replace(grid, pairs=[2], slices=[1]), tmp_path / "other.json" / "mqar.json", "test")


def test_what_a_grid_trains_is_checked_and_nothing_else(program):
    """keys = 16 is too few for the 256 pairs of a single run's default, which no run of the grid has."""
    grid = settings.load(program.Grid, RECIPE / "smoke.yaml")
    assert grid.training.keys == 16
    with pytest.raises(ValueError, match=r"pairs \(32\) must not exceed keys \(16\)"):
        dataclasses.replace(grid, pairs=[2, 32])
    assert {run.pairs for run in dataclasses.replace(grid, pairs=[2, 32], transition=2, reach=1).runs()} == {2}
    with pytest.raises(ValueError, match=r"reach \(0\.1\) leaves no run near 90\.0 x E"):
        dataclasses.replace(grid, reach=0.1)
    with pytest.raises(settings.SettingsError, match=r"unknown key training\.pairs"):
        settings.load(program.Grid, RECIPE / "smoke.yaml", ["training.pairs=2"])


def test_a_file_that_also_names_what_each_run_has_of_its_own_goes_on(program, tmp_path):
    """As files did in which `training` was one run of the grid."""
    grid = dataclasses.replace(settings.load(program.Grid, RECIPE / "smoke.yaml"), pairs=[2], slices=[1])
    row = {"metric": "accuracy", "N": 2, "E": 1, "seed": 0, "value": 1.0}
    file = {"training": settings.to_dict(grid.training) | {"pairs": 2, "slices": 8, "seed": 0}, "rows": [row]}
    (tmp_path / "mqar.json").write_text(json.dumps(file))
    assert program.run(grid, tmp_path / "mqar.json", "test") == file


def test_runs_near_the_fall_of_each_curve_come_first(program):
    grid = program.Grid([32, 64, 128, 256], slices=[1, 2], seeds=2, training=mqar.MqarTraining(), transition=64.0)
    order = [(run.seed, run.slices, run.pairs) for run in grid.runs()]
    assert order[:6] == [(0, 2, 128), (0, 1, 64), (0, 2, 256), (0, 1, 128), (0, 2, 64), (0, 1, 32)]
    assert [seed for seed, *_ in order] == [0] * 8 + [1] * 8
    assert order[6:8] == [(0, 1, 256), (0, 2, 32)]  # two doublings away
    assert [(r.seed, r.slices, r.pairs) for r in dataclasses.replace(grid, reach=1.0, seeds=1).runs()] == order[:6]
    for name in ("seeds", "processes", "reach", "seconds"):
        with pytest.raises(ValueError, match=f"{name} is 0 but must be above 0"):
            dataclasses.replace(grid, **{name: 0})


@pytest.mark.parametrize("processes", [1, 2])
def test_no_run_begins_after_its_time(program, monkeypatch, tmp_path, processes, capsys):
    clock = iter([0.0, 0.0, 0.0, 11.0, 11.0])  # of the start, then before each run
    monkeypatch.setattr(program, "ProcessPoolExecutor", lambda *_: concurrent.futures.ThreadPoolExecutor(processes))
    monkeypatch.setattr(program, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    row = {"metric": "accuracy", "value": 1.0}
    monkeypatch.setattr(program, "work", lambda c, index: row | {"N": c.pairs, "E": c.slices, "seed": c.seed})
    grid = dataclasses.replace(settings.load(program.Grid, RECIPE / "smoke.yaml"), processes=processes, seconds=10)
    result = program.run(grid, tmp_path / "mqar.json", "test", commit="abc")
    assert len([row for row in result["rows"] if row["metric"] == "accuracy"]) == 2
    assert result["commit"] == "abc"
    assert "2 runs have not begun" in capsys.readouterr().out


@pytest.mark.slow
def test_program_runs_several_processes(tmp_path):
    output = tmp_path / "mqar.json"
    arguments = ["--config", str(RECIPE / "smoke.yaml"), "--output", str(output), "processes=2"]
    subprocess.run([sys.executable, str(RECIPE / "run.py"), *arguments], check=True)
    found = {(row["N"], row["E"]) for row in json.loads(output.read_text())["rows"] if row["metric"] == "accuracy"}
    assert found == {(2, 1), (2, 2), (4, 1), (4, 2)}


@pytest.mark.parametrize("scale", ["paper", "small", "smoke"])
def test_grids_load(scale, program):
    grid = settings.load(program.Grid, RECIPE / f"{scale}.yaml")
    assert len(grid.runs()) == (51 if scale == "small" else len(grid.pairs) * len(grid.slices) * grid.seeds)
    if scale == "paper":
        assert (len(grid.runs()), grid.training) == (1000, mqar.MqarTraining())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 100}, "twice embedding_size"),
        ({"pairs": 33}, "must not exceed keys"),
        ({"tokens_per_step": 15}, "at least one sequence of 16"),
        ({"growth_from": 1}, "growth_from \\(1\\) must be at least 2"),
        ({"growth_steps": -1}, "growth_steps \\(-1\\) must be at least 0"),
        ({"max_sequences": 0}, "max_sequences \\(0\\) must be at least 1"),
        ({"steps": 0}, "steps \\(0\\) must be at least 1"),
        ({"test_sequences": 0}, "test_sequences \\(0\\) must be at least 1"),
        ({"pairs": 0}, "pairs \\(0\\) must be at least 1"),
        ({"slices": 0}, "slices \\(0\\) must be at least 1"),
        ({"values": 0}, "values \\(0\\) must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps \\(-1\\) must be at least 0"),
        ({"learning_rate": 0.0}, "learning_rate \\(0.0\\) must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay \\(-0.1\\) must be at least 0"),
    ],
)
def test_impossible_tasks_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)
