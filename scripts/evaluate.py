"""Evaluate a checkpoint: python scripts/evaluate.py runs/demo --suite demo --output runs/demo/evaluation [a.b=value]"""

import argparse
import sys
from pathlib import Path

from triadic import settings
from triadic.evaluation import SuiteConfig, evaluate
from triadic.group import end, leaving_group
from triadic.launch import is_main, refuse

SUITES = Path(__file__).resolve().parent.parent / "configs" / "eval"
NAMES = ", ".join(sorted(path.stem for path in SUITES.glob("*.yaml")))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a Hugging Face folder, a run folder or a hub id")
    parser.add_argument("--suite", help=f"{NAMES} (of configs/eval), or the path of a .yaml; without it, demo")
    parser.add_argument("--output", required=True, help="folder for results.json, results.md and figures")
    parser.add_argument("--overwrite", action="store_true", help="forget what another evaluation left in --output")
    parser.add_argument("settings", nargs="*", metavar="a.b=value", help="settings of the suite to change")
    args = parser.parse_intermixed_args()
    chosen = args.suite or "demo"
    path = chosen if chosen.endswith(".yaml") else SUITES / f"{chosen}.yaml"
    with leaving_group():
        try:
            suite, command = settings.load(SuiteConfig, path, args.settings), " ".join(sys.argv)
            if is_main():
                others = "" if args.suite else f"; --suite takes another: {NAMES}, or a .yaml"
                print(f"suite {chosen}: {', '.join(suite.parts())}{others}", file=sys.stderr, flush=True)
            results = evaluate(args.checkpoint, suite, args.output, overwrite=args.overwrite, command=command)
        except ValueError as error:
            refuse(error)
    if is_main():
        print((Path(args.output) / "results.md").read_text())
    failed = [check["name"] for check in results["checks"] if not check["passed"]]
    if failed and is_main():
        print(f"{len(failed)} of {len(results['checks'])} checks failed: {'; '.join(failed)}", file=sys.stderr)
    end(1 if failed else 0)
