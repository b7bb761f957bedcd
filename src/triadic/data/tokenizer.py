"""Tokenizers: trained or taken over, saved beside the data, and told apart by a hash.

The saved folder loads with AutoTokenizer. Called on a text, a trained tokenizer puts BOS in front, as every document
of a store starts with BOS; a pretrained one does what it did before. `prepare` adds BOS and EOS itself and encodes with
add_special_tokens=False, so neither doubles; whoever adds BOS himself (lm-eval's rolling mode does) must do the same.
"""

import hashlib
import json
import logging
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ..models.loading import load_tokenizer
from .config import TokenizerConfig, TrainTokenizer

log = logging.getLogger("triadic.data")

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
_PROBE = "In 1789,  the Président's\n\n\tN = 3.14e-2;  naïve 数学 🙂 </s> don't!"


def train(config: TrainTokenizer, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with `<pad>`, `<s>`, `</s>` = 0, 1, 2; decoding gives every text back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_limited(texts, config.max_characters), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    found = tokenizer.get_vocab_size()
    if found < config.vocab_size:
        log.info("the text yields only %d of the %d vocabulary entries asked for", found, config.vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def load_pretrained(config: TokenizerConfig):
    """The pretrained tokenizer with bos, eos and pad set to entries of its own vocabulary (which never grows).

    A missing bos becomes eos, a missing pad becomes eos; a missing eos raises ValueError.
    """
    try:
        tokenizer = load_tokenizer(config.pretrained, revision=config.revision)
    except ValueError as error:
        raise ValueError(f"tokenizer.pretrained: {error}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            f"tokenizer.pretrained={config.pretrained} has no fast (tokenizers) form, which is needed here"
        )
    vocabulary = tokenizer.get_vocab()
    for name in ("eos_token", "bos_token", "pad_token"):
        token = getattr(config, name) or getattr(tokenizer, name) or tokenizer.eos_token
        if token is None:
            raise ValueError(
                f"{config.pretrained} has no end-of-text token; name one of its entries in tokenizer.eos_token"
            )
        if token not in vocabulary:
            raise ValueError(f"tokenizer.{name}={token!r} is no entry of the vocabulary of {config.pretrained}")
        if getattr(tokenizer, name) != token:
            log.info("%s: %s is %s", config.pretrained, name, token)
            setattr(tokenizer, name, token)
    return tokenizer


def vocab_size(tokenizer) -> int:
    """One more than the highest id, added tokens included."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_hash(tokenizer) -> str:
    """What tells tokenizers apart: their entries, merges or scores, bos, eos, and the ids of a fixed text.

    Takes a tokenizer object, a folder or a hub id. Padding, truncation and the template around a text do not count, nor
    does how a version of the library writes the files.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    content = [entries, _ranking(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, probe]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _ranking(tokenizer) -> list:
    """What decides between segmentations: BPE's merges (as pairs, however the file writes them), Unigram's scores."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])]
    return merges or (model["vocab"] if isinstance(model.get("vocab"), list) else [])


@lru_cache(maxsize=2)
def encoder(path: str, digest: str) -> Tokenizer:
    """The tokenizer in tokenizer.json for documents: special tokens written out in a text stay text.

    `digest` is the tokenizer's hash; it only keeps a replaced file from being mistaken for the cached one.
    """
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _limited(texts: Iterable[str], characters: int) -> Iterable[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)
