"""Prints the relative error of kernel 2's inverse of I + L, on gluon_emulator.py's machine, against float64.

TRITON_INTERPRET=1 python tests/kernels/gluon_inverse_cases.py
"""

import json
import sys

import gluon_machine as machine
import torch
from gluon_emulator import stand_in
from gluon_machine import Shared, tile

C, K = 64, 128
BF16, F32 = torch.bfloat16, torch.float32


def problems():
    """Strictly lower L [C, C] by name: what rounding of a factor to bfloat16 alone would get wrong by 1e-3."""
    gen = torch.Generator().manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(C, 16, generator=gen), dim=-1)
    beta = 2 * torch.rand(C, generator=gen)
    return {"random keys": (keys @ keys.T * beta).tril(-1), "keys all alike": beta.expand(C, C).tril(-1)}


def inverse(masks, l):
    """(I + L)^-1 in the shared memory that masks_kernel gives it."""
    machine.block = machine.Block((0, 0, 0), (1, 1, 1), 4)
    q, k = (Shared.allocate(BF16, [C, K]) for _ in range(2))
    narrow, wide = q.reinterpret(BF16, [8, C, 16], None), k.reinterpret(BF16, [4, C, C // 2], None)
    rows = q.reinterpret(F32, [64, C // 16, 16], None).slice(0, 16, 0)
    i = tile(torch.arange(C))
    return masks.unit_lower_inverse(tile(l), i[:, None], i[None, :], narrow, wide, rows, None)


def main():
    sys.modules.update(stand_in())
    from triadic_kernels import gluon_masks

    for name, l in problems().items():
        exact = torch.linalg.inv(torch.eye(C).double() + l.double())
        error = (inverse(gluon_masks, l).as_subclass(torch.Tensor) - exact).norm() / exact.norm()
        print(json.dumps(dict(case=name, error=error.item())))


if __name__ == "__main__":
    main()
