"""How fast models decode: python scripts/benchmark_decoding.py configs/model/gdn_1.3b.json --batch 1 64 --out x.json"""

import argparse
import json
import sys
from pathlib import Path

import torch

from triadic.evaluation.speed import measure

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="model configs (JSON)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="prompt lengths, read at batch 1")
    parser.add_argument("--state", default="float32", help="dtype of recurrent states")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--steps", type=int, default=104, help="of a decoding run: 4 untimed, the others in 5 rounds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="result file (JSON)")
    args = parser.parse_args()
    try:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        if Path(args.out).is_dir():
            raise ValueError(f"{args.out} is a folder; name a file")
        for result in measure(**{**vars(args), "command": " ".join(sys.argv)}):
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result["rows"][-1]), flush=True)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
