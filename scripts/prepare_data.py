"""Tokenise text into a token store: python scripts/prepare_data.py --config configs/data/sotu.yaml [a.b=value ...]"""

import argparse
import logging

from triadic.data import DataConfig, prepare
from triadic.settings import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="a file like those in configs/data/")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace the file's")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        prepare(load(DataConfig, arguments.config, arguments.overrides))
    except ValueError as error:
        raise SystemExit(f"prepare_data: {error}") from None


if __name__ == "__main__":
    main()
