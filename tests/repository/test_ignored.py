"""What README's examples leave in the repository's folder is not offered to git."""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_readmes_examples_leave_nothing_for_git(tmp_path):
    readme = (ROOT / "README.md").read_text()
    places = r'save_cache\(cache, "(.*?)"\)', r'source\.files=\["(.*?)"\]', r"(?:--output |output(?:_dir)?=)([\w/]+)"
    written = {name for place in places for name in re.findall(place, readme)} - {"DIR"}
    assert {"book.safetensors", "my/*.txt", "data/my", "runs/my"} < written
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    command = ["git", "-C", tmp_path, "check-ignore", *(f"{name}/x" if "." not in name else name for name in written)]
    ignored = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert {name.removesuffix("/x") for name in ignored} == written
