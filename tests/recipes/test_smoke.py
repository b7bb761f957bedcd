"""Every recipe at its smallest, as a reader would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = {"figure1_mqar", "figure4_efficiency"}  # seconds; the others train several models
RECIPES = sorted(p.parent.name for p in (ROOT / "recipes").glob("*/expected.json"))


@pytest.mark.parametrize("recipe", [r if r in QUICK else pytest.param(r, marks=pytest.mark.slow) for r in RECIPES])
def test_smoke_scale_runs_and_leaves_its_table(recipe):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    table = ROOT / "recipes" / recipe / "results" / "smoke" / "table.md"
    table.unlink(missing_ok=True)
    subprocess.run(["sh", f"recipes/{recipe}/smoke.sh"], cwd=ROOT, env=environment, check=True)
    assert table.is_file()
    assert ("No results yet" in table.read_text()) == (recipe in ("figure1_mqar", "figure4_efficiency"))
