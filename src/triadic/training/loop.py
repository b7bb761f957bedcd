"""The training loop: `train` reads from top to bottom, `train_step` is the forward and backward of one step."""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import torch
from accelerate.utils import gather_object
from torch._dynamo.exc import TorchDynamoException

from triadic.data import step_indices
from triadic.models.loading import one_line
from triadic.training import background, checkpoint, engines, metrics, optim, parallel
from triadic.training.assemble import Run, assemble, collate_for, micro_batches
from triadic.training.compiled import check_gradients
from triadic.training.config import TrainConfig
from triadic.training.errors import TrainingError

IGNORED = -100  # the label of a position that is not scored


class NonFiniteError(TrainingError):
    """A loss or gradient norm was not finite; the message names the step, the windows and the documents."""


@dataclass(frozen=True)
class Outcome:
    """How `train` ended: at `step`, which is saved; `finished` unless a signal came before run.steps."""

    step: int
    finished: bool


def train(config: TrainConfig) -> Outcome:
    """Train or resume the run of `config` until run.steps, or until SIGTERM or SIGINT, which save first.

    Every rank calls this. Raises ValueError for settings, data or folders that cannot be used, NonFiniteError under
    run.on_nonfinite "stop", TrainingError (NonFiniteError's base) if a reader process dies or the disk refuses.
    """
    run = assemble(config)
    try:
        with (
            parallel.StopSignals() as signals,
            metrics.Reporter(run.accelerator, config, run.progress.step) as report,
            background.Watch(run.accelerator, config.parallel.stall_seconds) as watch,
            closing(micro_batches(run)) as batches,  # ends the reader processes whatever happens
        ):
            return _train(run, batches, report, watch, signals)
    except RuntimeError as error:  # torch raises it in the middle of whatever the trainer is doing
        if isinstance(error, TorchDynamoException):
            raise TrainingError(
                f"the model's layers cannot be compiled on this machine ({one_line(error)[:200]}); checkpoints are "
                "untouched; set model.torch_compile=false"
            ) from error
        if "DataLoader worker" not in str(error):
            raise
        raise TrainingError(
            f"a data worker died, most likely killed for memory ({str(error).strip()}); lower data.num_workers or "
            "data.prefetch_batches; checkpoints are untouched and the same command resumes from the newest"
        ) from error
    except OSError as error:  # log, plot, final folder, old checkpoints to remove, or the data
        raise TrainingError(
            f"the disk refuses: {error}; checkpoints are untouched, and the same command resumes from the newest"
        ) from error
    finally:
        run.writer.close()
        run.claim.release()


def _train(
    run: Run,
    batches: Iterator[dict],
    report: metrics.Reporter,
    watch: background.Watch,
    signals: parallel.StopSignals,
) -> Outcome:
    options, progress = run.config.run, run.progress
    meter, spikes = metrics.Meter(run.accelerator, run.config, run.bare.config), metrics.Spikes()
    for message in (*run.notes, meter.note):
        report.say(message)
    stopping, unchecked = False, run.config.model.torch_compile
    while progress.step < options.steps and not stopping:
        lr = optim.learning_rate(progress.step, run.config)
        optim.set_learning_rate(run.optimizer, lr)
        watch.at(progress.step, "reading data")
        step_batches = list(islice(batches, run.accumulation))
        watch.at(progress.step, "computing")
        if unchecked:
            report.say(check_gradients(run, to_device(step_batches[0], run.accelerator.device)))
            unchecked = False
        losses, grad_norm = train_step(run, step_batches)
        flags = (signals.received is not None, run.writer.failed)
        loss, stops, failures = parallel.total(run.accelerator, losses.sum(), *flags).tolist()
        loss, grad_norm, stopping = loss / run.accelerator.num_processes, grad_norm.item(), stops > 0
        if failures:
            run.writer.wait()  # raises on every rank
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            run.optimizer.step()
            report_spike(run, report, spikes.look(loss))
        else:
            skip_or_raise(run, report, losses, loss, grad_norm)
        run.optimizer.zero_grad()
        progress.step += 1
        report.advance()
        report.saved(run.writer.finished())
        meter.step()

        step, finished = progress.step, progress.step == options.steps
        if finite and (step % options.log_every == 0 or step == 1 or finished):
            report.record(training_row(run, loss, lr, grad_norm) | meter.lap(options.steps - step))
        with meter.paused():
            if step % options.validate_every == 0 or finished:
                watch.at(step - 1, "validating")
                report.record(validate(run))
            if step % options.save_every == 0 or step in options.milestones or finished or stopping:
                watch.at(step - 1, "saving")
                save(run, report)
    report.saved(run.writer.wait())
    return finish(run, report, signals)


def train_step(run: Run, batches: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward of this rank's micro-batches of one step; leaves clipped gradients in the model (ZeRO has
    taken its step with them, if they are finite).

    Every scored token of the step weighs the same, whichever micro-batch and rank it falls to: a micro-batch's loss is
    its sum of token losses / (scored tokens of the step over all ranks / ranks), and the mean over ranks that gradients
    go through makes that sum / tokens.

    Returns the micro-batches' losses [accumulation], whose sum is the step's loss after a mean over ranks, and the
    gradient norm before clipping.
    """
    accelerator, engine = run.accelerator, engines.of(run.accelerator)
    scored = sum(int((batch["shift_labels"] != IGNORED).sum()) for batch in batches)
    share = (parallel.total(accelerator, scored)[0] / accelerator.num_processes).float()
    losses = []
    for i, batch in enumerate(batches):
        with engine.micro_batch(accelerator, run.model, i == len(batches) - 1):
            loss = run.model(**to_device(batch, accelerator.device), num_items_in_batch=share, use_cache=False).loss
            engine.backward(accelerator, run.model, loss)
        losses.append(loss.detach())
    return torch.stack(losses), engine.clip(accelerator, run.model, run.config.optimizer.clip_norm)


@torch.no_grad()
def validate(run: Run) -> dict:
    """Mean loss per scored token over the first run.validation_windows validation windows of a fixed order."""
    accelerator, size = run.accelerator, run.config.batch.micro_batch_windows
    count = min(run.config.run.validation_windows, len(run.validation))
    place, places = run.place
    mine, pack = range(place, count, places), collate_for(run)
    nats, scored = 0.0, 0
    run.model.eval()
    for first in range(0, math.ceil(count / places), size):
        positions = mine[first : first + size]
        # a rank without windows left runs the model too: the others may need its part of the weights
        batch = pack([run.validation[position] for position in positions or [0]])
        with engines.autocast(accelerator, run.config.run.precision):
            losses = run.bare.token_losses(**to_device(batch, accelerator.device))
        if positions:
            scored += int((batch["shift_labels"] != IGNORED).sum())
            nats += losses.cpu().double().sum()
    run.model.train()
    nats, scored = parallel.total(accelerator, nats, scored).tolist()
    return position_row(run) | {"val_loss": nats / scored, "val_tokens": int(scored)}


def position_row(run: Run) -> dict:
    """Where the run stands: the first columns of every row of log.jsonl."""
    windows = run.progress.step * run.config.windows_per_step
    return {
        "step": run.progress.step,
        "tokens": windows * run.config.data.seq_len,
        "epoch": windows / len(run.windows),
    }


def training_row(run: Run, loss: float, lr: float, grad_norm: float) -> dict:
    skipped = run.progress.skipped_steps
    return position_row(run) | {"loss": loss, "lr": lr, "grad_norm": grad_norm, "skipped_steps": skipped}


def save(run: Run, report: metrics.Reporter) -> None:
    """Copy this moment to the memory of rank 0, which writes it as a checkpoint while training goes on, and then
    removes the ones that are no longer kept. Waits for the checkpoint before, if that is still being written."""
    report.saved(run.writer.wait())
    snapshot = checkpoint.take(run.accelerator, run.model, run.optimizer, run.progress)

    def write() -> str:
        path = checkpoint.write(run.checkpoints, snapshot, run.bare, run.tokenizer, run.config)
        checkpoint.prune(run.checkpoints, run.config.run.keep_last, run.config.run.milestones)
        return str(path)

    run.writer.start(write)
    report.plot()


def finish(run: Run, report: metrics.Reporter, signals: parallel.StopSignals) -> Outcome:
    """Publish the last step's model as final/, unless the run was stopped on its way."""
    step, finished = run.progress.step, run.progress.step >= run.config.run.steps
    if finished:
        parallel.on_main(run.accelerator, checkpoint.publish, run.checkpoints, step, run.folder / "final")
        report.say(f"finished at step {step}: {run.folder / 'final'}")
    else:
        name = signals.received.name if signals.received else "a signal to another rank"
        report.say(f"stopped by {name} after step {step}, which is saved; the same command goes on from there")
    return Outcome(step, finished)


def skip_or_raise(run: Run, report: metrics.Reporter, losses: torch.Tensor, loss: float, grad_norm: float) -> None:
    """What run.on_nonfinite says about a step whose loss or gradient norm is not finite; its gradients are unused.

    Names the micro-batches whose own loss is not finite, or all of the step's if only the gradients are not.
    """
    step, options = run.progress.step, run.config.run
    mine = step_indices(step, run.config.windows_per_step, *run.place, run.config.batch.micro_batch_windows)
    bad = [batch for batch, value in zip(mine, losses.tolist(), strict=True) if not math.isfinite(value)]
    culprits = gather_object(bad) or gather_object(mine)
    what = f"loss {loss}, gradient norm {grad_norm}, {identify(run, culprits)}"
    run.progress.skipped_steps += 1
    if options.on_nonfinite == "skip" and run.progress.skipped_steps <= options.nonfinite_limit:
        report.say(f"step {step + 1} is skipped ({run.progress.skipped_steps} so far): {what}")
        return
    limit = f" more than run.nonfinite_limit {options.nonfinite_limit} steps" if options.on_nonfinite == "skip" else ""
    raise NonFiniteError(
        f"not finite{limit}: step {step + 1}: {what}; nothing was saved, checkpoints are from steps before; lower "
        "optimizer.learning_rate, or set run.on_nonfinite=skip to leave such steps out"
    )


def report_spike(run: Run, report: metrics.Reporter, what: str) -> None:
    """Say which windows and documents a step had whose loss stands out."""
    if what and run.accelerator.is_main_process:
        per_step, step = run.config.windows_per_step, run.progress.step
        report.say(f"step {step + 1}: {what}, {identify(run, [list(range(step * per_step, (step + 1) * per_step))])}")


def identify(run: Run, micro_batches: list[list[int]]) -> str:
    """Which windows of the stream, and which documents of the store they were cut from."""
    positions = sorted({position for batch in micro_batches for position in batch})
    offsets = run.windows.store.offsets()  # [documents + 1]
    length = run.config.data.seq_len + 1
    named = []
    for position in positions[:8]:
        epoch, index = divmod(position, len(run.windows))
        first = int(run.windows.order(epoch)[index]) * length
        low, high = offsets.searchsorted(first, "right") - 1, offsets.searchsorted(first + length, "left") - 1
        named.append(f"{position} (documents {low}..{high})" if high > low else f"{position} (document {low})")
    more = f" and {len(positions) - 8} more" if len(positions) > 8 else ""
    return f"window positions {', '.join(named)}{more}"


def to_device(batch: dict, device: torch.device) -> dict:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
