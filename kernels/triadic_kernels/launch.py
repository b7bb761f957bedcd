"""Launch configurations of the plain Triton kernels: functions of the problem's head dims and dtype alone, so equal on
every rank and for every length.
"""

from functools import lru_cache
from typing import NamedTuple


class Launch(NamedTuple):
    """Keyword arguments of each kernel, and the precision of float32 products (those of 16-bit operands are exact)."""

    precision: str
    gates: dict
    masks: dict
    recurrence: dict
    state_gradients: dict
    mask_gradients: dict


def launch(p) -> Launch:
    return _launch(p.dtype.itemsize == 4, p.E, p.K, p.V)


@lru_cache
def _launch(wide: bool, E: int, K: int, V: int) -> Launch:
    # float32 inputs: three tf32 products each, 1e-6 relative; their tiles are twice as large, hence half as wide
    block = 32 if wide else 64
    return Launch(
        precision="tf32x3" if wide else "tf32",
        gates=dict(num_warps=1 if E < 4 else 4),
        masks=dict(BK=min(K, 2 * block), PREC_INV="tf32x3", num_warps=8 if E > 8 else 4, num_stages=1),
        recurrence=dict(BK=min(K, 2 * block), BV=min(V, 32 if V >= 32 else 16), num_warps=4, num_stages=1),
        state_gradients=dict(BK=min(K, block), BV=min(V, block), num_warps=8, num_stages=1 if wide else 2),
        mask_gradients=dict(BD=min(K, V, 32), BK=min(K, 2 * block), num_warps=8, num_stages=1),
    )
