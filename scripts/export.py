"""Export a checkpoint to a folder for the hub: python scripts/export.py runs/demo exports/demo [--dtype bfloat16]"""

import argparse
import sys

from triadic.evaluation.loading import find_checkpoint
from triadic.models.export import export


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a Hugging Face folder, a run folder or a hub id")
    parser.add_argument("output", help="new or empty folder")
    parser.add_argument("--tokenizer", help="folder or hub id, default: the checkpoint's")
    parser.add_argument("--dtype", default="auto", help="of the written weights, default: the checkpoint's")
    arguments = vars(parser.parse_args())
    try:
        export(find_checkpoint(arguments.pop("checkpoint")), **arguments)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
