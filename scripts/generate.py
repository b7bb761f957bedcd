"""Let a checkpoint continue a text: python scripts/generate.py runs/demo --prompt "The people of" """

import argparse
import sys

from triadic.evaluation import complete, load_checkpoint
from triadic.evaluation.config import check_sampling
from triadic.evaluation.sampling import prompt_ids


def show(text: str) -> None:
    print(text, end="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a Hugging Face folder, a run folder or a hub id")
    parser.add_argument("--prompt", default="", help="text to continue; empty: begin a document")
    parser.add_argument("--max_new_tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top_p", type=float, default=0.95)
    parser.add_argument("--top_k", type=int, default=50, help="0: all tokens")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    try:
        check_sampling(*(args[name] for name in ("temperature", "top_p", "top_k", "seed")))
        if args["max_new_tokens"] < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {args['max_new_tokens']}")
        found = load_checkpoint(args.pop("checkpoint"))
        prompt_ids(found.tokenizer, args["prompt"])  # refuses what cannot be shown either
        show(args["prompt"])
        made = complete(found.model, found.tokenizer, **args, on_text=show)
    except ValueError as error:
        sys.exit(f"error: {error}")
    speed = f"{made.tokens_per_s:.1f} tokens/s after {made.prefill_seconds:.2f} s"
    print(f"\n[{found.folder}: {made.tokens} tokens, {speed}]", file=sys.stderr)
