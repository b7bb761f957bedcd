"""Export a checkpoint to a folder for the hub: python scripts/export.py CHECKPOINT OUTPUT [--dtype bfloat16]"""

import argparse
import sys

from triadic.models.export import export


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="folder or hub id of a triadic model")
    parser.add_argument("output", help="new or empty folder")
    parser.add_argument("--tokenizer", help="folder or hub id, default: the checkpoint's")
    parser.add_argument("--dtype", default="auto", help="of the written weights, default: the checkpoint's")
    arguments = parser.parse_args()
    try:
        export(**vars(arguments))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
