"""Write a folder that any transformers installation can load: weights, tokenizer, card, and the model's own code.

The code files are this package's, beside the plain torch operations of triadic_kernels. Where triadic_kernels is
installed the copied model uses it (its GPU kernels included), else the files beside it.
"""

import json
import re
from pathlib import Path

import triadic_kernels
from transformers import GenerationConfig

from .accounting import count_parameters, figure, state_bytes
from .loading import load_tokenizer, load_weights, writing
from .modeling_triadic import TriadicForCausalLM

MODEL_FILES = (
    "configuration_triadic",
    "modeling_triadic",
    "mixers",
    "householder",
    "attention",
    "layers",
    "layout",
    "context",
    "cache",
    "losses",
)
KERNEL_FILES = (
    "op",
    "checks",
    "recurrent",
    "segments",
    "dispatch",
    "transforms",
    "reference",
    "packing",
    "conv",
    "features",
)
AUTO_MAP = {
    "AutoConfig": "configuration_triadic.TriadicConfig",
    "AutoModel": "modeling_triadic.TriadicModel",
    "AutoModelForCausalLM": "modeling_triadic.TriadicForCausalLM",
}


def export(checkpoint, output, tokenizer=None, dtype="auto"):
    """Export a checkpoint to a folder for the hub (or for `from_pretrained(folder, trust_remote_code=True)`).

    Args:
        checkpoint: a folder or hub id with a triadic model.
        output: the folder to write; it must be new or empty.
        tokenizer: a folder or hub id with the tokenizer; default: the checkpoint.
        dtype: of the written weights, "auto" keeps the checkpoint's ("bfloat16", ...); A_log and dt_bias stay float32.

    Raises:
        ValueError: the output folder holds something, the checkpoint is torn or incomplete, or the tokenizer
            has entries beyond the model's vocabulary; the disk refuses (then nothing is left of what was written).
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not an empty folder: give another output.")
    model = load_weights(TriadicForCausalLM, checkpoint, dtype=dtype)
    tokenizer = load_tokenizer(tokenizer or checkpoint)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries but the model's vocabulary {model.config.vocab_size}: "
            "give the tokenizer that the model was trained with."
        )
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    if ids["pad_token_id"] is None:
        ids["pad_token_id"] = ids["eos_token_id"]
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ids)
    with writing(output):
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
        write_code(output)
        add_auto_map(output / "config.json")
        (output / "README.md").write_text(model_card(model.config, output.name))


def write_code(folder):
    """Copy the code of the model and its plain torch operations into `folder`, as files that import one another."""
    for name in MODEL_FILES:
        (folder / f"{name}.py").write_text(standalone((Path(__file__).parent / f"{name}.py").read_text()))
    for name in KERNEL_FILES:
        source = Path(triadic_kernels.__file__).parent / f"{name}.py"
        (folder / f"{name}.py").write_text(source.read_text())


def standalone(source):
    """`from triadic_kernels.x import y` -> the same with the file x beside this one as a second choice."""
    return re.sub(
        r"^from triadic_kernels\.(\w+) import (.+)$",
        r"try:\n    from triadic_kernels.\1 import \2\nexcept ImportError:\n    from .\1 import \2",
        source,
        flags=re.MULTILINE,
    )


def add_auto_map(path):
    """Tell transformers' Auto classes which files of the folder hold the classes."""
    config = json.loads(path.read_text())
    config["auto_map"] = AUTO_MAP
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def model_card(config, name):
    """The folder's README.md: what the model is, what it costs, how to load it."""
    kinds = {kind: config.layer_types.count(kind) for kind in sorted(set(config.layer_types))}
    layers = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())
    state = f"{config.second_key_dim} x {config.linear_key_head_dim} x {config.linear_value_head_dim}"
    linear = f"| Linear attention | {config.linear_mixer}, {config.linear_num_value_heads} heads of state {state} |\n"
    context = config.max_position_embeddings
    return CARD.format(
        name=name,
        layers=layers,
        linear=linear if "linear_attention" in kinds else "",
        parameters=figure(count_parameters(config)[0] / 1e6, 1),
        state=figure(state_bytes(config, context) / 1e6, 1),
        context=context,
        vocab=config.vocab_size,
    )


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- triadic
- linear-attention
---

# {name}

A causal language model with triadic linear attention: a recurrent state of third order, written by key, second key
and value and read by query and second query (Sieberling et al., *Triadic Linear Attention*, arXiv 2609.36529).

| | |
|---|---|
| Parameters | {parameters} M |
| Layers | {layers} |
{linear}| Vocabulary | {vocab} |
| Memory of decoding | {state} MB per sequence of {context} tokens (2 bytes an entry; states: 4 by default) |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("The state of the union", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0], skip_special_tokens=True))
```

`trust_remote_code` runs the code in this folder, which needs torch and transformers alone. With the package `triadic`
installed (`import triadic`) it is not needed, and the GPU kernels are used.
"""
