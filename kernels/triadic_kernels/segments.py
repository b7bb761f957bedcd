"""Less memory for more time: an op over a long sequence as a chain of segments, each computed again in its backward."""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def in_segments(op, size: int, tensors: dict, initial_state, cu_seqlens, output_final_state):
    """op(**tensors, initial_state=, cu_seqlens=) over T in segments of `size` tokens that hand their states on; what
    the backward of a segment needs lives only while it runs, but for the last, whose backward comes first.

    Args:
        op: a function like `chunk_triadic`.
        tensors: its inputs [B, T, ...], some of them None.

    A cut through packed documents leaves those outside a segment empty there, and empty documents hand their states
    through: at any cut at most one document is under way.
    """
    tokens = tensors["q"].shape[1]
    split = {name: None if x is None else x.split(size, 1) for name, x in tensors.items()}
    outputs, state = [], initial_state
    for i, start in enumerate(range(0, tokens, size)):
        last = start + size >= tokens
        inputs = {name: None if x is None else x[i] for name, x in split.items()}
        cu = None if cu_seqlens is None else (cu_seqlens - start).clamp(0, min(size, tokens - start))
        run = partial(op, cu_seqlens=cu, output_final_state=output_final_state or not last)
        if last:
            o, state = run(**inputs, initial_state=state)
        else:
            o, state = checkpoint(
                run, **inputs, initial_state=state, use_reentrant=False, preserve_rng_state=False
            )  # fmt: skip
        outputs.append(o)
    return torch.cat(outputs, 1), state


def check_segment_size(size) -> None:
    """Raise ValueError for anything but an int >= 1."""
    if isinstance(size, Tensor) or not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"segment_size is {size!r}; pass a number of tokens >= 1, best a multiple of 64, or None.")
