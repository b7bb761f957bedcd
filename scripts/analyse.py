"""Analyse checkpoints: python scripts/analyse.py runs/gdn [runs/e8 ...] --config FILE --output DIR [a.b=value ...]

Writes results.json, table.md and figure.png: half-lives, write strengths, rank of the state (of models with our mixers,
in the place of others too), use of context (of any causal language model).
"""

import argparse
import sys
from pathlib import Path

from triadic import settings
from triadic.analysis import AnalysisConfig, analyse, draw, write_table
from triadic.evaluation import load_checkpoint
from triadic.evaluation.documents import open_documents
from triadic.evaluation.journal import write_json
from triadic.origin import origin, versions


def measure(name: str, config: AnalysisConfig) -> list[dict]:
    """Rows of one checkpoint: of a model without our mixers the use of context; ValueError if its text is unknown."""
    found = load_checkpoint(name)
    data = config.data or found.run.get("validation")
    if data is None:
        raise ValueError(f"{name} lies in no run folder, so its validation text is unknown; give data=PATH")
    documents = open_documents(data, found.tokenizer)
    return [{"model": name} | row for row in analyse(found.model, documents.lengths, documents.read, config)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="CHECKPOINT | a.b=value", help="models, and settings to change")
    parser.add_argument("--config", required=True, help="settings, such as recipes/scales/small/analyse.yaml")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    args = parser.parse_intermixed_args()
    names = [word for word in args.words if "=" not in word]
    try:
        config = settings.load(AnalysisConfig, args.config, [word for word in args.words if "=" in word])
        if not names:
            raise ValueError("there is no checkpoint to analyse; name a Hugging Face folder, a run folder or a hub id")
        if args.output.exists() and not args.output.is_dir():
            raise ValueError(f"{args.output} is no folder; name another --output")
        rows = [row for name in names for row in measure(name, config)]
        header = origin(" ".join(["python", *sys.argv])) | {"versions": versions()}
        write_json(args.output / "results.json", header | {"settings": settings.to_dict(config), "rows": rows})
        figure = draw(rows, args.output / "figure.png")
        print(write_table(rows, args.output / "table.md"))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(figure)
