"""Back ends in the order in which they are tried.

A back end is one module beside this file and one row in `CHUNK` (or `RECURRENT`). It defines

    unsupported(p) -> str | None                    why it cannot run problem p, in one sentence; None if it can
    forward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, keep) -> (o, ht, saved)
    saved_like(p, q, cu_seqlens) -> [Tensor]        empty tensors shaped like `saved` when keep is true
    backward(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, saved, do, dht)
        -> (dq, dk, dv, dq2, dk2, dg, dbeta, dh0)   None where the input is None

Tensors arrive checked, contiguous and in their public layout; absent ones are None (q2 and k2: E = 1 and ones; g: no
decay; beta: ones; h0: zeros; cu_seqlens: B sequences of length T; dht: no gradient). `keep` says that a backward will
follow; without it `saved` is []. ht is None unless p.output_final, and outputs never alias inputs or one another.
Gradients have the shape and dtype of their inputs. A row of `RECURRENT` defines `unsupported` and
`recurrent(p, q, k, v, q2, k2, g, beta, h0, cu_seqlens, ht=None) -> (o, ht)`: the final state, in the dtype of h0, goes
to the given ht, which may be h0. Where p.needs_grad it is differentiable by plain autograd, or unsupported.
"""

import hashlib
import importlib
import warnings
from functools import lru_cache, wraps
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

# name that the caller writes -> module beside this file, best first
CHUNK = {"gluon_hopper": "gluon_hopper", "triton": "triton_chunk", "torch": "reference"}
RECURRENT = {"gluon_hopper": "gluon_decode", "triton": "decode", "torch": "reference"}

_loaded = {}  # module name -> module, or the ImportError as text
_capabilities = {}  # CUDA device -> compute capability


class Problem(NamedTuple):
    """What a back end needs to know to accept or refuse a call: plain values, no tensors.

    The first four are those that no compiled kernel depends on; the others are its `kind`.
    """

    B: int
    T: int
    N: int  # sequences: B, or the number of packed documents
    scale: float
    H: int
    HV: int
    K: int
    V: int
    E: int
    dtype: torch.dtype  # of q, k, v and o
    device_type: str
    capability: tuple[int, int] | None  # of the CUDA device
    delta_rule: bool
    has_q2: bool
    gate: str | None  # "slice": g is [B, T, HV, E]; "head": [B, T, HV]
    has_beta: bool
    state: torch.dtype | None  # of the initial state; None: there is none
    output_final: bool
    varlen: bool
    needs_grad: bool = False  # a recurrent call that autograd follows

    @property
    def has_initial(self) -> bool:
        return self.state is not None

    @property
    def kind(self) -> tuple:
        return self[4:]


def capability(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device, asked once: a dictionary, since Dynamo looks through functools' caches and says so."""
    if device.type == "cuda" and device not in _capabilities:
        _capabilities[device] = torch.cuda.get_device_capability(device)
    return _capabilities.get(device)


def problem(
    q, k, v, q2, g, beta, h0, cu_seqlens, *, scale: float, delta_rule: bool, output_final: bool, needs_grad=False
) -> Problem:  # fmt: skip
    """Describe a call by the shapes, dtypes and devices of its (checked) tensors."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    device = q.device
    return Problem(
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        E=1 if q2 is None else q2.shape[-1],
        N=B if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        dtype=q.dtype,
        device_type=device.type,
        capability=capability(device),
        delta_rule=delta_rule,
        scale=scale,
        has_q2=q2 is not None,
        gate=None if g is None else ("slice" if g.ndim == 4 else "head"),
        has_beta=beta is not None,
        state=None if h0 is None else h0.dtype,
        output_final=output_final,
        varlen=cu_seqlens is not None,
        needs_grad=needs_grad,
    )


def load(module: str):
    """The back end's module, or why it cannot be imported, as text."""
    if module not in _loaded:
        try:
            _loaded[module] = importlib.import_module(f".{module}", __package__)
        except (ImportError, AttributeError) as error:  # missing, or another release than it was written for
            _loaded[module] = f"not installed ({error})"
    return _loaded[module]


def refusal(module: str, p: Problem) -> str | None:
    """Why this back end cannot run the problem; None if it can."""
    backend = load(module)
    return backend if isinstance(backend, str) else backend.unsupported(p)


def select(name: str, p: Problem, table: dict[str, str] = CHUNK):
    """The module that runs the problem: the first able one for "auto", else exactly the one named.

    Raises ValueError if the name is unknown or that back end cannot run the problem.
    """
    if name == "auto":
        for module in table.values():
            if refusal(module, p) is None:
                return load(module)
        raise ValueError(f"No back end can run this call:\n{report(p, table)}")
    if name not in table:
        raise ValueError(f"backend={name!r} is unknown; choose one of {', '.join(['auto', *table])}.")
    reason = refusal(table[name], p)
    if reason is not None:
        raise ValueError(f"backend={name!r} cannot run this call: {reason}; backend='auto' takes the first that can.")
    return load(table[name])


def run(name: str, p: Problem, method: str, *arguments, table: dict[str, str] = CHUNK):
    """Call `method` of the back end that `select` gives.

    Where that is "auto"'s choice and Triton cannot compile or start it, the next able one that keeps the same tensors
    (for a backward) takes its place for good, and a warning says so.
    """
    module = select(name, p, table)
    try:
        return getattr(module, method)(p, *arguments)
    except Exception as error:
        if name != "auto" or not any(c.__module__.split(".")[0] == "triton" for c in type(error).__mro__):
            raise
        row = next((row for row, file in table.items() if _loaded.get(file) is module), None)
        if row is None:  # another thread has met it first
            return run(name, p, method, *arguments, table=table)
        lines = str(error).strip().splitlines()
        _loaded[table[row]] = f"does not compile here ({lines[-1] if lines else type(error).__name__})"
        other = select(name, p, table)
        if method != "recurrent" and other.saved_like is not module.saved_like:
            _loaded[table[row]] = module
            raise
        message = f"{row}: {_loaded[table[row]]}; a slower back end runs in its place.\n{report(p, table)}"
        warnings.warn(message, stacklevel=2)
        return getattr(other, method)(p, *arguments)


def report(p: Problem, table: dict[str, str] = CHUNK) -> str:
    """One line per back end, in order: which one "auto" takes, which ones could run, and why the others cannot."""
    lines, chosen = [], False
    for name, module in table.items():
        reason = refusal(module, p)
        if reason is None:
            reason = "can run" if chosen else "selected"
            chosen = True
        lines.append(f"{name}: {reason}")
    return "\n".join(lines)


PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


def plain(tensors) -> bool:
    """Whether nothing needs to see the op itself: no compiler, tracer, function transform, dispatch mode, subclass or
    meta tensor. Then it can be called directly: torch.library around it would cost 0.1 ms of host time.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
        and PLAIN.issuperset(map(type, tensors))
        and not tensors[0].is_meta
    )


def has_tangent(tensors) -> bool:
    """Whether forward-mode autograd follows one of them, which kernels and torch.library would ignore in silence."""
    return forward_ad._current_level >= 0 and any(
        x is not None and x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def as_promised(x):
    """Tensors, alone or in a list, contiguous and with the strides of new ones: where a dimension has size 1, or the
    tensor no element, those of contiguous tensors may be any.
    """
    if not isinstance(x, torch.Tensor):
        return type(x)(map(as_promised, x)) if isinstance(x, (list, tuple)) else x
    strides = _strides_of_new(x.shape)
    if x.stride() == strides:  # as nearly always
        return x
    x = x.contiguous()
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


@lru_cache(4096)
def _strides_of_new(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def dense(implementation, overwritten: int | None = None):
    """The implementation of a torch.library op, on contiguous tensors: a compiler may lay what it hands over out with
    gaps between rows, and an op's results must have the strides that its fake promised. `overwritten` is the place of
    the argument, if any, that the op writes to.
    """

    @wraps(implementation)
    def call(*arguments):
        given = [*map(as_promised, arguments)]
        results = as_promised(implementation(*given))
        if overwritten is not None and given[overwritten].data_ptr() != arguments[overwritten].data_ptr():
            arguments[overwritten].copy_(given[overwritten])
        return results

    return call


PROBE = Problem(
    1, 1, 1, 1.0, 1, 1, 16, 16, 1, torch.float32, "cpu", None, True, True, "slice", True, None, False, False
)  # fmt: skip


@torch.compiler.assume_constant_result
def surroundings() -> str:
    """What decides, beside a call's own tensors, which back end takes it and what that keeps for the backward: which
    ones this process can run, and their code. Compilers keep graphs on disk for other processes (Inductor does) and
    tell them apart by an op's arguments, so this must be one.
    """
    return hashlib.sha256(f"{_sources()} {report(PROBE)}".encode()).hexdigest()[:16]


@lru_cache(None)
def _sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
