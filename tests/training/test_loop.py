"""One step against its definition, validation, and what happens when a number is not finite or a worker dies."""

import functools
import itertools
import json
import math
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from triadic.data import Windows, collate
from triadic.models.modeling_triadic import compile_layers
from triadic.training import NonFiniteError, TrainingError, assemble, engines, loop, train
from triadic.training.compiled import check_gradients

ROOT = Path(__file__).resolve().parents[2]
UNEVEN = ("data.mask_boundary_targets=true", "batch.global_batch_tokens=512")  # 16 windows a step


@pytest.fixture
def begin(configure, world):
    """begin("a.b=value", ...) -> a Run that stands at step 0, in a folder of its own."""
    count = 0

    def make(*overrides: str) -> assemble.Run:
        nonlocal count
        count += 1
        config = configure(*overrides)
        return assemble.assemble(configure(*overrides, f"run.output_dir={config.run.output_dir}{count}"))

    return make


def by_definition(run, positions) -> tuple[float, float]:
    """Loss per scored token and gradient norm, every document piece run by itself and its logits scored plainly."""
    model = run.bare.eval()
    model.zero_grad()
    nats, scored = torch.zeros(()), 0
    for position in positions:
        window = run.windows[position]
        bounds = [*(window["position_ids"] == 0).nonzero().flatten().tolist(), run.config.data.seq_len]
        for low, high in itertools.pairwise(bounds):
            logits = model(window["input_ids"][None, low:high], use_cache=False).logits[0]
            labels = window["shift_labels"][low:high]
            nats = nats + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            scored += int((labels != -100).sum())
    (nats / scored).backward()
    norm = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters() if p.grad is not None))
    model.zero_grad()
    model.train()
    return float(nats.detach() / scored), norm


@pytest.mark.parametrize("model", ["gdn", "hybrid"])
def test_every_scored_token_weighs_the_same_whatever_the_accumulation(begin, world, model):
    found = {}
    for accumulation in (1, 4, 16):
        run = begin(*UNEVEN, f"model.config={world}/{model}.json", f"batch.micro_batch_windows={16 // accumulation}")
        batches = list(loop.islice(loop.micro_batches(run), run.accumulation))
        assert len(batches) == accumulation
        losses, norm = loop.train_step(run, batches)
        found[accumulation] = (float(losses.sum()), float(norm))
        counts = {int((batch["shift_labels"] != -100).sum()) for batch in batches}
        assert accumulation == 1 or len(counts) > 1, "the micro-batches must be uneven for this to test anything"
        run.claim.release()
    expected = by_definition(run, range(16))
    for values in found.values():
        assert values == pytest.approx(expected, rel=2e-5)


def test_gradients_are_clipped_and_the_norm_is_the_one_before(begin):
    run = begin("optimizer.clip_norm=0.01")
    _, norm = loop.train_step(run, list(loop.islice(loop.micro_batches(run), run.accumulation)))
    after = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in run.bare.parameters()))
    assert norm > 0.1
    assert after == pytest.approx(0.01, rel=1e-3)


def test_the_first_step_moves_by_the_first_learning_rate(begin):
    run = begin("optimizer.weight_decay=0", "optimizer.learning_rate=0.03", "run.steps=1", "schedule.warmup_steps=0")
    run.claim.release()
    before = run.bare.lm_head.weight.detach().clone()
    train(run.config)
    after = load_file(Path(run.config.run.output_dir) / "final" / "model.safetensors")["lm_head.weight"]
    # Adam's first update is the sign of the gradient; cosine's end after one step: 10 % of the peak
    assert (after - before).abs().max() == pytest.approx(0.003, rel=1e-3)


def test_validation_is_the_mean_over_the_tokens_of_a_fixed_subset(begin):
    run = begin("run.validation_windows=25", "batch.micro_batch_windows=2", "data.mask_boundary_targets=true")
    run.windows = Windows(run.validation.store, 32, seed=0, mask_boundary_targets=True)
    expected, _ = by_definition(run, range(25))
    row = loop.validate(run)
    assert row["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert row["val_tokens"] == sum(int((run.windows[i]["shift_labels"] != -100).sum()) for i in range(25)) < 25 * 32
    assert loop.validate(run) == row
    assert run.model.training


def test_bf16_autocasts_over_float32_weights(begin):
    run = begin("run.precision=bf16")
    batches = list(loop.islice(loop.micro_batches(run), run.accumulation))
    seen = []
    run.bare.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    losses, norm = loop.train_step(run, batches)
    run.optimizer.step()
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in run.bare.parameters()} == {p.grad.dtype for p in run.bare.parameters()} == {torch.float32}
    assert {v.dtype for state in run.optimizer.optimizer.state.values() for v in state.values()} == {torch.float32}
    expected = by_definition(run, range(8))[0]
    assert losses.dtype == torch.float32
    assert math.isfinite(norm)
    assert float(losses.sum()) != expected


def test_gradient_checkpointing_gives_the_same_step(begin):
    found = []
    for flag in ("false", "true"):
        run = begin(f"model.gradient_checkpointing={flag}")
        losses, norm = loop.train_step(run, list(loop.islice(loop.micro_batches(run), run.accumulation)))
        assert run.bare.model.gradient_checkpointing == (flag == "true")
        found.append((float(losses.sum()), float(norm)))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def poison(monkeypatch, token: int | slice) -> None:
    """Every model built from here on has a NaN embedding for `token`."""
    build = assemble.build_model

    def poisoned(*arguments, **named):
        model = build(*arguments, **named)
        model.get_input_embeddings().weight.data[token] = math.nan
        return model

    monkeypatch.setattr(assemble, "build_model", poisoned)


def test_stop_names_step_windows_and_documents_and_saves_nothing(begin, configure, monkeypatch, rows):
    run = begin("batch.micro_batch_windows=1")
    store, offsets = run.windows.store, run.windows.store.offsets()
    token = run.tokenizer.convert_tokens_to_ids("Q")  # one document has one
    for seed in range(99):  # until some order reads it in the second step
        windows = Windows(store, 32, seed)
        (position,) = [p for p in range(len(windows)) if token in windows[p]["input_ids"]]
        if 8 <= position < 16:
            break
    first = int(windows.order(0)[position]) * 33
    documents = [d for d in range(len(offsets) - 1) if offsets[d] < first + 33 and offsets[d + 1] > first]
    named = f"documents {documents[0]}..{documents[-1]}" if len(documents) > 1 else f"document {documents[0]}"

    poison(monkeypatch, token)
    config = configure("batch.micro_batch_windows=1", f"run.seed={seed}", "run.save_every=1")
    said = f"not finite: step 2: loss nan, gradient norm nan, window positions {position} ({named}); nothing was saved"
    with pytest.raises(NonFiniteError, match=re.escape(said)):
        train(config)
    folder = Path(config.run.output_dir)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00000001"]
    assert [row["step"] for row in rows(folder)] == [1]


def test_skip_counts_leaves_the_weights_alone_and_goes_on(configure, monkeypatch, capsys, rows):
    step_of, after = loop.train_step, {}

    def flaky(run, batches):
        losses, norm = step_of(run, batches)
        after[run.progress.step] = run.bare.lm_head.weight.detach().clone()
        if run.progress.step == 4:  # the fifth step
            run.bare.lm_head.weight.grad.fill_(math.inf)
            norm = norm * math.inf
        return losses, norm

    monkeypatch.setattr(loop, "train_step", flaky)
    config = configure("run.on_nonfinite=skip", "run.save_every=100")
    assert train(config).finished
    assert torch.equal(after[4], after[5])
    assert not torch.equal(after[5], after[6])
    assert "step 5 is skipped (1 so far): loss" in capsys.readouterr().out
    logged = [row for row in rows(config.run.output_dir) if "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    assert [row["skipped_steps"] for row in logged] == [0] * 4 + [1] * 7


def test_skip_has_a_limit(configure, monkeypatch):
    poison(monkeypatch, slice(None))
    with pytest.raises(NonFiniteError, match=r"more than run.nonfinite_limit 2 steps: step 3: loss nan"):
        train(configure("run.on_nonfinite=skip", "run.nonfinite_limit=2"))


def test_a_worker_that_dies_is_named(configure, monkeypatch):
    read = Windows.__getitem__

    def deadly(self, position):
        if position == 20 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, position)

    monkeypatch.setattr(Windows, "__getitem__", deadly)
    with pytest.raises(RuntimeError, match=r"a data worker died, .*lower data.num_workers"):
        train(configure("data.num_workers=1", "run.validate_every=100"))


@pytest.mark.parametrize("error", [ConnectionResetError, EOFError, FileNotFoundError])
def test_a_worker_that_dies_while_it_hands_over_a_batch_is_named(configure, monkeypatch, error):
    def gone(_reader):
        raise error

    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._next_data", gone)
    with pytest.raises(RuntimeError, match=r"a data worker died, .*handed over a batch.*lower data.num_workers"):
        train(configure("data.num_workers=1", "run.validate_every=100"))


def test_a_bad_window_read_by_a_worker_is_one_sentence(configure, monkeypatch):
    read = Windows.__getitem__

    def damaged(self, position):
        window = read(self, position)
        window["input_ids"][3] = 300
        return window

    monkeypatch.setattr(Windows, "__getitem__", damaged)
    with pytest.raises(ValueError, match=r"^token id 300 lies outside the vocabulary of 300;"):
        train(configure("data.num_workers=1"))


def test_more_than_one_epoch_is_said(begin):
    length = len(begin().windows)
    steps = length // 8 + 1  # one step into the second epoch
    said = "\n".join(begin(f"run.steps={steps}").notes)
    assert f"{256 * steps:,} tokens are {8 * steps / length:.2f} epochs of" in said
    assert "each epoch in an order of its own" in said
    assert "order" not in "\n".join(begin("run.steps=4").notes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_stream_without_gap_or_overlap(begin, monkeypatch, ranks):
    run = begin("batch.micro_batch_windows=2", "run.steps=5")
    run.progress.step = 2  # as after resuming
    shares = []
    for rank in range(ranks):
        monkeypatch.setattr(run, "accelerator", SimpleNamespace(process_index=rank, num_processes=ranks))
        shares.append([position for batch in assemble.StepBatches(run) for position in batch])
    by_step = [sorted(p for share in shares for p in share[i * 8 // ranks : (i + 1) * 8 // ranks]) for i in range(3)]
    assert by_step == [list(range(8 * step, 8 * step + 8)) for step in (2, 3, 4)]


def test_batches_are_collated_windows_in_order(begin):
    run = begin("data.num_workers=2", "run.steps=3")
    with loop.closing(loop.micro_batches(run)) as batches:
        for i, batch in enumerate(batches):
            expected = collate([run.windows[p] for p in range(4 * i, 4 * i + 4)])
            assert batch.keys() == expected.keys()
            assert all(torch.equal(torch.as_tensor(batch[k]), torch.as_tensor(expected[k])) for k in batch)
    assert i == 5


def compiler(factor):
    """A torch.compile backend whose results are `factor` times too large."""
    return lambda graph, _: lambda *inputs: [factor * y for y in graph(*inputs)]


def test_wrong_gradients_of_compiled_layers_end_the_run(configure, monkeypatch):
    monkeypatch.setattr(assemble, "compile_layers", functools.partial(compile_layers, backend=compiler(1.1)))
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"other gradients than plain layers .* set model.torch_compile=false"):
        train(configure("run.steps=3", "model.torch_compile=true"))


@pytest.mark.parametrize(
    ("engine", "factor", "message"),
    [("single", 1.0, "gradients are those of plain layers"), ("zero2", 1.1, "gradients are not compared")],
)
def test_what_is_said_of_compiled_layers(begin, monkeypatch, engine, factor, message):
    monkeypatch.setattr(assemble, "compile_layers", functools.partial(compile_layers, backend=compiler(factor)))
    torch._dynamo.reset()
    run = begin("model.torch_compile=true")
    monkeypatch.setattr(engines, "name_of", lambda _: engine)
    assert message in check_gradients(run, collate([run.windows[0]]))
    assert all(parameter.grad is None for parameter in run.bare.parameters())


def test_the_check_of_compiled_layers_changes_nothing(configure, monkeypatch, rows, tmp_path):
    monkeypatch.setattr(assemble, "compile_layers", functools.partial(compile_layers, backend="eager"))
    for flag in ("false", "true"):
        overrides = ("run.steps=3", f"model.torch_compile={flag}", f"run.output_dir={tmp_path}/{flag}")
        assert train(configure(*overrides)).finished
    plain, checked = ([row["loss"] for row in rows(tmp_path / flag) if "loss" in row] for flag in ("false", "true"))
    assert plain == checked


def test_layers_that_cannot_be_compiled(configure, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no C++ compiler\nset CXX")

    monkeypatch.setattr(assemble, "compile_layers", functools.partial(compile_layers, backend=broken))
    torch._dynamo.reset()
    with pytest.raises(TrainingError, match=r"^the model's layers cannot be compiled on .*no C\+\+ compiler.*=false$"):
        train(configure("model.torch_compile=true"))


def test_dropout_is_not_taken_for_wrong_gradients(begin, world, tmp_path, monkeypatch):
    """Compiled layers draw other masks than plain ones."""
    settings = json.loads((world / "hybrid.json").read_text())
    (tmp_path / "dropout.json").write_text(json.dumps(settings | {"attention_dropout": 0.5}))
    monkeypatch.setattr(assemble, "compile_layers", functools.partial(compile_layers, backend=compiler(1.1)))
    torch._dynamo.reset()
    run = begin("model.torch_compile=true", f"model.config={tmp_path}/dropout.json")
    assert "not compared with those of plain layers, attention_dropout" in check_gradients(
        run, collate([run.windows[0]])
    )


def test_gradients_that_are_not_finite_are_not_the_compilers_fault(configure, monkeypatch):
    monkeypatch.setattr(assemble, "compile_layers", functools.partial(compile_layers, backend="eager"))
    torch._dynamo.reset()
    monkeypatch.setattr(assemble, "build_model", poisoned(assemble.build_model))
    with pytest.raises(NonFiniteError, match="not finite: step 1: loss nan"):
        train(configure("run.steps=3", "model.torch_compile=true"))


def poisoned(build):
    """`build`, whose model has a NaN in its last norm."""

    def built(*arguments, **named):
        model = build(*arguments, **named)
        model.model.norm.weight.data[0] = math.nan
        return model

    return built


@pytest.mark.slow
def test_torch_compile_gives_the_same_steps(configure, tmp_path, rows):
    for flag in ("false", "true"):
        overrides = ("run.steps=4", "run.validate_every=100", "run.save_every=100", f"model.torch_compile={flag}")
        assert train(configure(*overrides, f"run.output_dir={tmp_path}/{flag}")).finished
    for eager, compiled in zip(rows(tmp_path / "false"), rows(tmp_path / "true"), strict=True):
        assert eager == pytest.approx(compiled, rel=1e-4)


@pytest.mark.parametrize("kind", [NonFiniteError, TrainingError])
def test_the_script_says_why_training_had_to_stop_in_one_line(settings_file, monkeypatch, kind):
    def stop(config):
        raise kind("the disk refuses")

    monkeypatch.setattr(loop, "train", stop)
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--config", str(settings_file)])
    with pytest.raises(SystemExit, match=r"^error: the disk refuses$"):
        runpy.run_path(str(ROOT / "scripts" / "pretrain.py"), run_name="__main__")
