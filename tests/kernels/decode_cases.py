"""Runs a back end of `recurrent_triadic` and prints every error against the token recurrence in float64.

A program of its own, as triton_cases.py:
    TRITON_INTERPRET=1 python tests/kernels/decode_cases.py small
    python tests/kernels/decode_cases.py small large --device cuda --dtypes bfloat16,float32
    python tests/kernels/decode_cases.py large hopper --device cuda --backend gluon_hopper --only-supported
"""

import argparse
import json
import time

import torch
from triadic_kernels import dispatch, recurrent_triadic
from triton_cases import DEFAULT, make, outputs, relative

# Every value at least once: one token and a few, E from none to 32, groups, gates, packed and empty documents.
SMALL = [
    dict(T=1, B=3, E=8, K=16, V=32),
    dict(T=1, B=2, E=8, H=2, HV=4, delta=False, gate="head", beta=False),
    dict(T=1, B=2, E=1, q2=False, h0=False, H=2, HV=2, K=64, V=16),
    dict(T=1, E=32, K=16, V=16, decay="strong"),
    dict(T=1, E=3, K=32, V=64, gate=None),
    dict(T=4, B=2, E=4, H=1, HV=3),
    dict(T=0, B=2, E=2),
    dict(lens=[1, 0, 3], E=2, K=16, V=16, H=2, HV=2),
    dict(lens=[1, 1, 1], E=5, K=16, V=16),
    dict(T=2, E=1, K=256, V=256),
]
LARGE = [
    *(dict(T=T, B=3, H=2, HV=4, K=128, V=128, E=E) for E in (1, 2, 4, 8, 16, 32) for T in (1, 5)),
    *(dict(T=1, B=2, H=2, HV=2, K=K, V=V, E=E) for K, V in ((256, 256), (16, 256), (256, 16)) for E in (1, 8, 32)),
    dict(T=300, B=2, H=1, HV=1, K=128, V=128, E=8),
]
# What the Gluon kernel takes: groups, gates, both mixers; more tiles than programs, and fewer than it has stages.
HOPPER = [
    dict(T=1, B=3, E=8, H=1, HV=2, K=128, V=128),
    dict(T=1, B=2, E=8, H=2, HV=4, K=128, V=128, delta=False, gate="head", beta=False, shifted=True),
    dict(T=1, E=8, K=128, V=128, gate=None),
    dict(T=1, E=8, H=1, HV=3, K=128, V=128, decay="strong", delta=False),
]
LISTS = {"small": SMALL, "large": LARGE, "hopper": HOPPER}


def check(c, dtype, state_dtype, device, backend="triton", only_supported=False):
    """Errors of the op, and whether the state in place, a second run and a run without final state (where the back end
    takes one) agree with it. None: it does not take the problem, and that was `only_supported` asked for.
    """
    c = {**DEFAULT, **c}
    x, cu = make(c, dtype, device)
    h0 = None if x["h0"] is None else x["h0"].to(state_dtype)
    x = {name: None if name in ("do", "dht") else t for name, t in x.items()} | {"h0": h0}
    names = ("q", "k", "v", "q2", "k2", "g", "beta")
    call = dict({name: x[name] for name in names}, delta_rule=c["delta"], cu_seqlens=cu, backend=backend)
    p = dispatch.problem(
        *(x[name] for name in ("q", "k", "v", "q2", "g", "beta")), h0, cu,
        scale=c["K"] ** -0.5, delta_rule=c["delta"], output_final=True,
    )  # fmt: skip
    if only_supported and dispatch.refusal(dispatch.RECURRENT[backend], p):
        return None
    o, ht = recurrent_triadic(**call, initial_state=h0, output_final_state=True)
    again = recurrent_triadic(**call, initial_state=h0, output_final_state=True)
    agree = dict(
        repeatable=all(torch.equal(a, b) for a, b in zip((o, ht), again, strict=True)),
        state_dtype=ht.dtype == (torch.float32 if h0 is None else h0.dtype),
    )
    if h0 is not None:
        state = h0.clone()
        inplace, same = recurrent_triadic(**call, initial_state=state, inplace_state=True)
        agree |= dict(inplace=torch.equal(inplace, o) and torch.equal(state, ht) and same is state)
        odd = torch.empty(h0.numel() + 1, dtype=h0.dtype, device=device)[1:].view_as(h0).copy_(h0)
        recurrent_triadic(**call, initial_state=odd, inplace_state=True)
        agree |= dict(misaligned=torch.equal(odd, ht))
    leaves = {name: t.double() for name, t in x.items() if t is not None}
    want = dict(zip(("o", "ht"), outputs(c, leaves, cu, c["K"] ** -0.5), strict=True))
    errors = {name: relative(y, want[name]) for name, y in (("o", o), ("ht", ht))}
    if dispatch.refusal(dispatch.RECURRENT[backend], p._replace(output_final=False)) is None:
        alone, nothing = recurrent_triadic(**call, initial_state=h0)
        errors["alone"] = relative(alone, want["o"])
        agree |= dict(without_state=nothing is None)
    return dict(
        case=c, dtype=str(dtype)[6:], state=str(state_dtype)[6:], errors=errors, worst=max(errors.values()), **agree
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", choices=list(LISTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--states", default="float32")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--only-supported", action="store_true", help="leave out what the back end refuses")
    a = parser.parse_args()
    for dtype in a.dtypes.split(","):
        for state in a.states.split(","):
            for c in [c for name in a.cases for c in LISTS[name]]:
                start = time.time()
                dtypes = getattr(torch, dtype), getattr(torch, state)
                row = check(c, *dtypes, a.device, a.backend, a.only_supported)
                if row is None:
                    continue
                print(json.dumps(row | {"seconds": round(time.time() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
