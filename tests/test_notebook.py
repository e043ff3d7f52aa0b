"""The notebook runs from a fresh kernel: all of its code, in order, in one namespace of a new process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 300


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    notebook = json.loads((ROOT / "notebooks" / "tour.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return notebook["cells"]


def test_nothing_is_stored_but_the_source(cells: list[dict[str, Any]]) -> None:
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 10 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_all_cells_run_within_five_minutes(cells: list[dict[str, Any]]) -> None:
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = os.environ | {"MPLBACKEND": "Agg"}  # no display
    # Warnings are no errors here: pyplot warns that this backend shows nothing.
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b[32m" in done.stdout and "the engine's step is the same" in done.stdout
    assert "arithmetic: " in done.stdout and "code: " in done.stdout and "open: " in done.stdout
