"""Enlarge a checkpoint's state: python scripts/upcycle.py runs/gdn runs/gdn_e8 --second_key_dim 8

Writes a Hugging Face folder that pretraining can start from (model.config and model.init_from). A target that the same
command has already written is left as it is.

Public checkpoints are converted on the way, --second_key_dim 1 converts alone: flash-linear-attention's GatedDeltaNet
becomes a TriadicForCausalLM; OLMo-Hybrid, Qwen3-Next and Qwen3.5 keep their decoder and get our mixer in place, to be
loaded after `import triadic.models.families`.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from triadic.evaluation.loading import find_checkpoint
from triadic.models.conversion import load_any
from triadic.models.loading import load_tokenizer, writing
from triadic.models.upcycling import STARTS, upcycle

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a Hugging Face folder, a run folder or a hub id")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--second_key_dim", type=int, required=True, help="E, a multiple of the source's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the written weights")
    parser.add_argument(
        "--start", choices=STARTS, default="normal", help="normal: the paper's; exact: the old function"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the new weights")
    args = parser.parse_args()
    wanted = {name: str(value) if name == "target" else value for name, value in vars(args).items()}
    note, text = args.target / "upcycled.json", json.dumps(wanted, indent=2) + "\n"
    try:
        if args.target.exists():
            if not note.is_file() or note.read_bytes() != text.encode():
                raise ValueError(f"{args.target} exists and is not of this command; remove it or name another folder")
            print(f"{args.target} is already there")
            sys.exit()
        folder = find_checkpoint(args.source)
        tokenizer = load_tokenizer(folder)
        model, converted = load_any(folder, getattr(torch, args.dtype))
        if not converted or args.second_key_dim != 1:
            model = upcycle(model, args.second_key_dim, start=args.start, seed=args.seed)
        with writing(args.target):
            model.save_pretrained(args.target)
            tokenizer.save_pretrained(args.target)
            note.write_text(text)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{args.target}: E = {args.second_key_dim}, {model.num_parameters() / 1e6:.1f}M parameters")
