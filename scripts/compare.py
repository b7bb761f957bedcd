"""Evaluations side by side: python scripts/compare.py FOLDER ... --output DIR [--paper table1/gdn "triadic gdn E=4"]"""

import argparse

from triadic.evaluation.compare import compare
from triadic.launch import refuse

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders with a results.json of scripts/evaluate.py")
    parser.add_argument("--output", required=True, help="folder for comparison.md, comparison.json and figures")
    parser.add_argument("--paper", nargs="*", default=[], metavar="ROW", help="rows of the paper's tables")
    args = parser.parse_args()
    try:
        print(compare(args.folders, args.output, args.paper))
    except ValueError as error:
        refuse(error)
