"""Multi-query associative recall: how many key-value pairs the state of a two-layer model holds (paper, Figure 1).

A sequence is N pair tokens, then N query tokens. A pair is the embedding of a key next to that of a value; a query is
the embedding of one of the keys next to zeros, every key once, in random order. Keys of a sequence are different,
values are drawn independently. The loss is the cross-entropy over the whole vocabulary at the N query outputs, the
accuracy the share of queries whose most probable token is the value that stood with the key.

The model is the decoder of triadic.models with the plain third-order recurrence S_e <- S_e + k2_e k v^T: no
convolution, activation, L2 norm, gate or delta rule; E = 1 keeps its second projections. Queries never write.

Training starts on a plateau, loss = log(values), that many pairs hold it on for long: the right value is one of N in
the read-out, and random queries do not resemble their keys. `growth_steps` starts with few pairs and doubles them once
the model tells those apart; `matched_start` starts with query projections that are copies of the key projections.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from triadic.evaluation.journal import gather, rank, world_size
from triadic.models import TriadicConfig, TriadicModel
from triadic.models.losses import LanguageModelHead
from triadic.models.mixers import TriadicLinearAttention

if TYPE_CHECKING:
    from triadic.evaluation.config import MqarGridConfig
    from triadic.evaluation.suite import Context

LOOK = 20  # steps between looks at the loss while the plateau lasts
TEST_SEED = 1_000_003  # of the held-out sequences; training draws with the run's seed


@dataclasses.dataclass(frozen=True)
class MqarTraining:
    """What the runs of a grid have in common: the paper's values."""

    keys: int = 8192  # vocabulary: keys, then values
    values: int = 8192
    embedding_size: int = 64
    hidden_size: int = 128  # twice the embedding: key next to value
    intermediate_size: int = 384
    layers: int = 2
    heads: int = 4
    head_dim: int = 16
    steps: int = 50_000
    tokens_per_step: int = 250_000
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    weight_decay: float = 0.1  # of matrices
    growth_from: int = 2  # with growth_steps: N begins here until the loss is below log(growth_from), less than naming
    growth_steps: int = 0  # any value of the sequence gives; then it doubles, evenly over these steps, until `pairs`
    matched_start: bool = False  # q = k and q2 = k2 before the first step; the paper draws each for itself
    max_sequences: int | None = None  # in a step, where few pairs would make them many; None: what its tokens give
    test_sequences: int = 3000
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16: autocast over fp32 weights

    def __post_init__(self):
        for name, value in vars(self).items():
            least = int(name not in ("seed", "warmup_steps", "growth_steps"))
            if type(value) is int and value < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")
        if self.hidden_size != 2 * self.embedding_size:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be twice embedding_size ({self.embedding_size}): a token is "
                "two embeddings side by side"
            )
        if self.growth_steps and self.growth_from < 2:
            raise ValueError(
                f"growth_from ({self.growth_from}) must be at least 2: of a single pair the loss is never below log 1"
            )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate ({self.learning_rate}) must be above 0")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay ({self.weight_decay}) must be at least 0")


@dataclasses.dataclass(frozen=True)
class MqarConfig(MqarTraining):
    """One run: a training, for N and E of your choice."""

    pairs: int = 256  # N
    slices: int = 8  # E
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.pairs > self.keys:
            raise ValueError(
                f"pairs ({self.pairs}) must not exceed keys ({self.keys}): a sequence's keys are different"
            )
        if self.tokens_per_step < 2 * self.pairs:
            raise ValueError(
                f"tokens_per_step ({self.tokens_per_step}) must hold at least one sequence of {2 * self.pairs} tokens"
            )


def one_run(training: MqarTraining, pairs: int, slices: int, seed: int = 0) -> MqarConfig:
    """A run of a grid; raises ValueError if there can be no such run."""
    common = {field.name: getattr(training, field.name) for field in dataclasses.fields(MqarTraining)}
    return MqarConfig(**common, pairs=pairs, slices=slices, seed=seed)


def model_config(config: MqarConfig) -> TriadicConfig:
    """The plain third-order recurrence as a model configuration."""
    return TriadicConfig(
        vocab_size=config.keys + config.values,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        linear_key_head_dim=config.head_dim,
        linear_value_head_dim=config.head_dim,
        linear_mixer="sgla",
        linear_conv_kernel_dim=0,
        linear_activation="none",
        linear_qk_norm=False,
        second_key_dim=config.slices,
        second_key_activation="none",
        decay_gate="none",
        write_gate=False,
        output_gate_activation="none",
        output_gate_rank=None,
    )


class ReadOnlyQueries(TriadicLinearAttention):
    """The mixer in which the second half of the tokens, the queries, writes nothing."""

    def gates(self, x):
        decay, _, output_gate = super().gates(x)
        batch, length = x.shape[:2]
        writes = torch.arange(length, device=x.device) < length // 2
        writes = writes.to(torch.promote_types(x.dtype, torch.float32))
        heads = self.config.linear_num_value_heads
        return decay, writes[None, :, None].expand(batch, length, heads), output_gate

    @torch.no_grad()
    def match(self):
        """Make the query projections copies of the key projections."""
        q, k, _, q2, k2 = self.in_proj_qkv.weight.split(self.qkv_sizes)
        q.copy_(k)
        q2.copy_(k2)


class MqarModel(nn.Module):
    """Embeddings of half the width, the decoder, and an untied head over the vocabulary."""

    def __init__(self, config: MqarConfig):
        super().__init__()
        decoder_config = model_config(config)
        self.decoder = TriadicModel(decoder_config)
        for index, layer in enumerate(self.decoder.layers):
            mixer = ReadOnlyQueries(decoder_config, index)
            mixer.load_state_dict(layer.mixer.state_dict())
            layer.mixer = mixer
        self.decoder.set_input_embeddings(nn.Embedding(decoder_config.vocab_size, config.embedding_size))
        self.head = LanguageModelHead(config.hidden_size, decoder_config.vocab_size, bias=False)
        for weight in (self.decoder.get_input_embeddings().weight, self.head.weight):
            nn.init.normal_(weight, std=decoder_config.initializer_range)
        if config.matched_start:
            for layer in self.decoder.layers:
                layer.mixer.match()

    def forward(self, keys, values, queries):
        """Hidden states [B, N, D] at the queries [B, N] to keys and values [B, N], all token ids."""
        embed = self.decoder.get_input_embeddings()
        pairs = torch.cat([embed(keys), embed(values)], dim=-1)  # [B, N, D]
        asked = embed(queries)
        asked = torch.cat([asked, torch.zeros_like(asked)], dim=-1)
        tokens = torch.cat([pairs, asked], dim=1)  # [B, 2 N, D]
        return self.decoder(inputs_embeds=tokens, use_cache=False).last_hidden_state[:, keys.shape[1] :]

    def loss(self, keys, values, queries, answers):
        """Mean cross-entropy of the answers [B, N] over the whole vocabulary, in nats."""
        return self.head(self(keys, values, queries), answers) / answers.numel()


def draw(config: MqarConfig, pairs: int, sequences: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """keys, values, queries, answers, each [sequences, pairs] int64 on the generator's device."""
    device = generator.device

    def choose(choices: int) -> torch.Tensor:
        """`pairs` different numbers below `choices` in random order: where the largest of as many draws stand."""
        return torch.rand(sequences, choices, generator=generator, device=device).topk(pairs, dim=1).indices

    keys = choose(config.keys)
    values = torch.randint(config.values, (sequences, pairs), generator=generator, device=device) + config.keys
    order = choose(pairs)
    return keys, values, keys.gather(1, order), values.gather(1, order)


def pairs_at(config: MqarConfig, step: int, left: int | None) -> int:
    """N of a training step, if the plateau was `left` at an earlier one (None: not yet).

    Constant, or growth_from on the plateau and doubling over the growth_steps after it.
    """
    if not config.growth_steps or config.pairs <= config.growth_from:
        return config.pairs
    if left is None:
        return config.growth_from
    doublings = math.ceil(math.log2(config.pairs / config.growth_from))
    done = 1 + (step - left) * doublings // config.growth_steps
    return min(config.pairs, config.growth_from * 2 ** min(done, doublings))


def learning_rate_factor(config: MqarConfig, step: int) -> float:
    """Linear warm-up, then a cosine to 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def measure_accuracy(model: MqarModel, config: MqarConfig, device: torch.device) -> float:
    """Share of right answers on the held-out sequences of this N."""
    generator = torch.Generator(device).manual_seed(TEST_SEED)
    at_once = max(1, min(config.tokens_per_step, 65_536) // (2 * config.pairs))
    right = 0
    for first in range(0, config.test_sequences, at_once):
        sequences = min(at_once, config.test_sequences - first)
        keys, values, queries, answers = draw(config, config.pairs, sequences, generator)
        with _autocast(config, device):
            logits = model.head(model(keys, values, queries))  # [b, N, V]
        right += int((logits.argmax(-1) == answers).sum())
    return right / (config.test_sequences * config.pairs)


def train(
    config: MqarConfig, device: str | torch.device = "cpu", on_log: Callable[[dict], None] | None = None
) -> dict[str, Any]:
    """Train one model and measure it: {"N", "E", "seed", "value": accuracy, "loss": last, "seconds", ...}.

    "left" is the step after which a loss below log N was first seen, None if none was: the host looks every LOOK steps
    at the least of all losses so far, and after the last step, since looking waits for the device.
    `on_log` receives {"step", "pairs", "loss"} twenty times.
    """
    device = torch.device(device)
    torch.manual_seed(config.seed)
    model = MqarModel(config).to(device)
    optimizer = torch.optim.AdamW(_groups(model, config), lr=config.learning_rate, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(config, step))
    generator = torch.Generator(device).manual_seed(config.seed)
    start, tokens, left = time.perf_counter(), 0, None
    least = torch.tensor(math.inf, device=device)
    for step in range(config.steps):
        pairs = pairs_at(config, step, left)
        sequences = config.tokens_per_step // (2 * pairs)
        sequences = min(sequences, config.max_sequences or sequences)
        batch = draw(config, pairs, sequences, generator)
        with _autocast(config, device):
            loss = model.loss(*batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        tokens += sequences * 2 * pairs
        if left is None:  # until then N is the same
            least = torch.fmin(least, loss.detach())
            look = (step + 1) % LOOK == 0 or step + 1 == config.steps
            left = step + 1 if look and least.item() < math.log(pairs) else None
        if on_log and (step + 1) % max(1, config.steps // 20) == 0:
            on_log({"step": step + 1, "pairs": pairs, "loss": loss.item()})
    return {
        "metric": "accuracy",
        "N": config.pairs,
        "E": config.slices,
        "seed": config.seed,
        "value": measure_accuracy(model, config, device),
        "loss": loss.item(),
        "left": left,
        "steps": config.steps,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _groups(model: MqarModel, config: MqarConfig) -> list[dict]:
    """Weight decay for matrices, none for the norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]


def _autocast(config: MqarConfig, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def summarize(rows: list[dict[str, Any]], training: MqarTraining) -> Iterator[dict[str, Any]]:
    """For each E of the accuracy rows: parameters, N at 50 % accuracy, and its ratio to that of half the E."""
    capacities: dict[int, float] = {}
    base = count_non_embedding(one_run(training, 1, 1))
    for slices in sorted({row["E"] for row in rows}):
        count = count_non_embedding(one_run(training, 1, slices))
        vocabulary = (training.keys + training.values) * (training.embedding_size + training.hidden_size)
        yield {"metric": "params_m", "E": slices, "value": (count + vocabulary) / 1e6}
        yield {"metric": "non_embedding_ratio", "E": slices, "value": count / base}
        curve: dict[int, list[float]] = {}
        for row in rows:
            if row["E"] == slices:
                curve.setdefault(row["N"], []).append(row["value"])
        found = capacity({pairs: statistics.fmean(values) for pairs, values in curve.items()})
        if found is None:
            continue
        capacities[slices] = found
        yield {"metric": "capacity", "E": slices, "value": found}
        if slices // 2 in capacities and slices % 2 == 0:
            yield {"metric": "capacity_gain", "E": slices, "value": found / capacities[slices // 2]}


def count_non_embedding(config: MqarConfig) -> int:
    """Parameters without the embedding and the head."""
    with torch.device("meta"):
        decoder = TriadicModel(model_config(config))
    return sum(p.numel() for p in decoder.parameters()) - decoder.get_input_embeddings().weight.numel()


def capacity(curve: dict[int, float]) -> float | None:
    """N at which accuracy falls through one half, interpolated in log N; None if the curve {N: accuracy} does not."""
    points = sorted(curve.items())
    for (low, above), (high, below) in itertools.pairwise(points):
        if above >= 0.5 > below:
            share = (above - 0.5) / (above - below)
            return low * (high / low) ** share
    return None


def check(context: "Context", config: "MqarGridConfig") -> dict[str, str]:
    """Raise ValueError unless the slices are given or the checkpoint has some."""
    _slices(context, config)
    return {}


def measure(context: "Context", config: "MqarGridConfig") -> list[dict[str, Any]]:
    """One row for each model trained, then what `summarize` makes of them. Processes share the runs between them."""
    runs = [
        one_run(config.training, pairs, slices, seed)
        for slices in _slices(context, config)
        for pairs in config.pairs
        for seed in range(config.seeds)
    ]

    def some(group: list[MqarConfig]) -> list[dict[str, Any]]:
        rows = [train(run, context.checkpoint.model.device) for run in group[rank() :: world_size()]]
        return gather([{key: value for key, value in row.items() if key != "seconds"} for row in rows])

    rows, size = [], world_size()
    for run in range(0, len(runs), size):
        group = runs[run : run + size]
        names = "-".join(f"E{r.slices}.N{r.pairs}.{r.seed}" for r in group)
        rows += context.journal.once(f"mqar-{names}", functools.partial(some, group))
    return [*rows, *summarize(rows, config.training)]


def _slices(context: "Context", config: "MqarGridConfig") -> list[int]:
    own = getattr(context.checkpoint.model.config, "second_key_dim", None)
    if config.slices is None and own is None:
        raise ValueError(f"{context.checkpoint.name} has no second key whose size mqar could take; give mqar.slices")
    return config.slices or [own]
