"""What `prepare` is told: where text comes from, how it is tokenised, what is held out and how sources are mixed."""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainTokenizer:
    """A byte-level BPE trained on the source's training documents (never on held-out ones)."""

    vocab_size: int  # entries, special tokens and the 256 bytes included
    max_characters: int = 1_000_000_000  # stop reading after this much text

    def __post_init__(self):
        if self.vocab_size < 259:
            raise ValueError(
                f"tokenizer.train.vocab_size must be at least 259 (256 bytes, 3 special), not {self.vocab_size}"
            )


@dataclass(frozen=True)
class TokenizerConfig:
    """Either `train` or `pretrained` (a hub id, or a folder that AutoTokenizer loads)."""

    train: TrainTokenizer | None = None
    pretrained: str | None = None
    revision: str | None = None
    bos_token: str | None = None  # an entry of the pretrained vocabulary to use instead of its own
    eos_token: str | None = None
    pad_token: str | None = None

    def __post_init__(self):
        if (self.train is None) == (self.pretrained is None):
            raise ValueError(
                "tokenizer needs exactly one of train (a new byte-level BPE) and pretrained (an id or folder)"
            )


@dataclass(frozen=True)
class Validation:
    """Whole documents held out from the head of the source's (shuffled) order: by `documents` or by `tokens`."""

    documents: int = 0
    tokens: int = 0
    min_characters: int = 0  # with `documents`: shorter ones are passed over

    def __post_init__(self):
        if self.documents and self.tokens:
            raise ValueError("validation takes documents or tokens, not both")
        if self.documents < 0 or self.tokens < 0:
            raise ValueError("validation.documents and validation.tokens cannot be negative")
        if self.min_characters and not self.documents:
            raise ValueError("validation.min_characters goes with validation.documents")


@dataclass(frozen=True)
class Reserve:
    """Keep everything up to the `documents`-th document of at least `min_characters` out of training."""

    documents: int = 0
    min_characters: int = 0

    def __post_init__(self):
        if self.documents < 0 or self.min_characters < 0:
            raise ValueError("reserve.documents and reserve.min_characters cannot be negative")


@dataclass(frozen=True)
class SourceConfig:
    """Text: a dataset of the hub, local files, or the files of an installed package."""

    dataset: str | None = None  # hub id
    name: str | None = None  # the dataset's configuration
    revision: str | None = None
    data_files: list[str] = field(default_factory=list)  # patterns inside the dataset's repository
    split: str = "train"
    streaming: bool = True  # read while downloading; false keeps a copy in the datasets cache
    files: list[str] = field(default_factory=list)  # local globs: .txt (a document per file), .jsonl, .parquet
    package: str | None = None  # an installed distribution; `files` are then globs among its files
    text_column: str = "text"
    id_column: str | None = None  # kept in the store beside the tokens (.txt files always keep their path)
    where: dict[str, list[str]] = field(default_factory=dict)  # keep rows whose column has one of these values
    min_characters: int = 1
    shuffle: bool = False  # streams: their files, then rows through a buffer; everything else completely
    shuffle_seed: int = 0
    shuffle_buffer: int = 10_000
    max_tokens: int | None = None  # stop once this many training tokens are there
    reserve: Reserve = field(default_factory=Reserve)
    validation: Validation = field(default_factory=Validation)

    def __post_init__(self):
        if (self.dataset is None) == (not self.files):
            raise ValueError(
                "a source needs exactly one of dataset (a hub id) and files (local globs, or of a package)"
            )
        if self.package is not None and self.dataset is not None:
            raise ValueError("source.package goes with source.files, not with source.dataset")
        if self.data_files and self.dataset is None:
            raise ValueError("source.data_files selects files of a hub dataset; local globs go in source.files")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"source.max_tokens must be positive, not {self.max_tokens}")
        if self.reserve.documents and self.validation.tokens:
            raise ValueError("source.reserve needs validation by documents, not by tokens")
        if self.shuffle_buffer < 1:
            raise ValueError(f"source.shuffle_buffer must be at least 1, not {self.shuffle_buffer}")
        if self.min_characters < 1:
            raise ValueError(f"source.min_characters must be at least 1, not {self.min_characters}")


@dataclass(frozen=True)
class MixturePart:
    """One ingredient: a prepared store, or a source that is prepared for it."""

    share: float  # of the mixture's tokens
    store: str | None = None  # folder of a prepared store, such as data/pg19/train
    source: SourceConfig | None = None
    repeat: bool = False  # start over when its documents run out

    def __post_init__(self):
        if (self.store is None) == (self.source is None):
            raise ValueError("a mixture part needs exactly one of store (a prepared folder) and source")
        if not 0 < self.share <= 1:
            raise ValueError(f"a mixture part's share must lie in (0, 1], not {self.share}")


@dataclass(frozen=True)
class Mixture:
    """Whole documents of every part up to its share of `tokens`, shuffled together once."""

    tokens: int
    parts: dict[str, MixturePart]
    seed: int = 0

    def __post_init__(self):
        for name in self.parts:
            if not re.fullmatch(r"\w[\w.-]*", name):  # a folder is named after it
                raise ValueError(f"a mixture part's name must be letters, digits, '_', '.' and '-', not {name!r}")
        total = sum(part.share for part in self.parts.values())
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares of a mixture must add up to 1, these add up to {total:.6f}")
        if self.tokens < 1:
            raise ValueError(f"mixture.tokens must be positive, not {self.tokens}")


@dataclass(frozen=True)
class DataConfig:
    """One prepared output folder: `tokenizer/`, `train/` and, when documents are held out, `validation/`."""

    output: str
    tokenizer: TokenizerConfig
    source: SourceConfig | None = None
    mixture: Mixture | None = None
    workers: int | None = None  # tokenising processes; null: one a core; 1: this one. Changes no byte
    part_characters: int = 64_000_000  # text per unit of work, the most that a kill can cost each worker

    def __post_init__(self):
        if (self.source is None) == (self.mixture is None):
            raise ValueError("a data configuration needs exactly one of source and mixture")
        if self.mixture is not None and self.tokenizer.train is not None:
            raise ValueError("a mixture needs tokenizer.pretrained: its parts were tokenised before it")
        if self.tokenizer.train is not None and self.source.validation.tokens:
            raise ValueError(
                "tokenizer.train needs source.validation.documents: tokens cannot be counted before it exists"
            )
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")
        if not 1 <= self.part_characters <= 1_000_000_000:
            raise ValueError(f"part_characters must lie in [1, 1e9], not {self.part_characters}")
