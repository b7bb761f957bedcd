"""How fast models train on random tokens: python scripts/benchmark_training.py configs/model/gdn_1.3b.json --out x.json

On several GPUs: torchrun --nproc_per_node 2 scripts/benchmark_training.py ... (data parallel, or --context 2).
"""

import argparse
import sys
from pathlib import Path

from triadic.group import end, leaving_group
from triadic.launch import refuse
from triadic.training.speed import LONG, make_cells, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="model configs (JSON)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096], help="tokens of a window")
    parser.add_argument("--pass-tokens", type=int, default=16_384, help="tokens of a forward pass, at least a window")
    parser.add_argument("--accumulation", type=int, default=4, help="passes of a step, in windows up to 16384 tokens")
    parser.add_argument("--documents", type=int, default=1, help="documents in each window")
    parser.add_argument("--checkpoint", choices=["auto", "on", "off"], default="auto", help=f"auto: from {LONG} on")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--context", type=int, default=1, help="processes that share each window")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--seconds", type=float, help="begin no measurement later than that")
    parser.add_argument("--profile", action="store_true", help="add the time of each kernel in one more step")
    parser.add_argument("--out", required=True, help="result file (JSON)")
    a = parser.parse_args()
    with leaving_group():
        try:
            Path(a.out).parent.mkdir(parents=True, exist_ok=True)
            command = " ".join(["python", *sys.argv]).replace(f" --out {a.out}", "")
            cells = make_cells(
                a.models, a.lengths, a.pass_tokens, a.accumulation, a.checkpoint, compiled=not a.eager,
                documents=a.documents, context=a.context, precision=a.precision,
            )  # fmt: skip
            run(cells, a.steps, a.seconds, Path(a.out), command, a.profile)
        except (ValueError, OSError) as error:
            refuse(error)
    end()
