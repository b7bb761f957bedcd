"""Text files below a folder as JSON lines, one file for each package: python gather_text.py FOLDER OUTPUT"""

import gzip
import html
import json
import re
import sys
from pathlib import Path

KINDS = {".c", ".h", ".S", ".rst", ".txt", ".html", ".htm", ".py", ".el", ".pod", ".md"}
SCRIPT = re.compile(r"<(script|style)\b.*?</\1>", re.S | re.I)
SKIPPED = re.compile(r"asic_reg|drivers/gpu/.*/include/")  # tables of registers, a quarter of the kernel's text
LONGEST = 600_000  # characters; what is longer, a program wrote
TAG = re.compile(r"<[^>]*>")
SPACE = re.compile(r"\n\s*\n\s*")


def read(path: Path) -> str | None:
    """A file's text, tags of HTML removed; None if it is of another kind, a table, too long or not UTF-8."""
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind not in KINDS or SKIPPED.search(str(path)) or path.is_symlink() or not path.is_file():
        return None
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except UnicodeDecodeError:
        return None
    if kind in (".html", ".htm"):
        text = SPACE.sub("\n\n", html.unescape(TAG.sub("", SCRIPT.sub("", text)))).strip()
    return text if len(text) <= LONGEST else None


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, output = map(Path, sys.argv[1:])
    for package in sorted(folder for folder in source.iterdir() if folder.is_dir()):
        count = 0
        with open(output / f"{package.name}.jsonl", "w") as file:
            for path in sorted(package.rglob("*")):
                text = read(path)
                if text:
                    print(json.dumps({"id": str(path.relative_to(source)), "text": text}), file=file)
                    count += 1
        print(f"{package.name}: {count} documents")
