"""Fetch what a suite reads, or say what is missing, without a checkpoint: python scripts/fetch_suite.py all [a.b=value]

Hub data come into the hub's cache, so that an evaluation finds them where there is no network.
"""

import argparse
import sys
from pathlib import Path

from triadic import settings
from triadic.evaluation import SuiteConfig, fetch

SUITES = Path(__file__).resolve().parent.parent / "configs" / "eval"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", help="a name in configs/eval, or the path of a .yaml")
    parser.add_argument("settings", nargs="*", metavar="a.b=value", help="settings of the suite to change")
    args = parser.parse_intermixed_args()
    path = args.suite if args.suite.endswith(".yaml") else SUITES / f"{args.suite}.yaml"
    try:
        parts = fetch(settings.load(SuiteConfig, path, args.settings))
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"suite {args.suite}: nothing is missing for {', '.join(parts) or 'it'}")
