"""The scripts are run, on the small pair."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_measure_ends_with_one_json_line() -> None:
    command = [sys.executable, "scripts/measure.py", "--target", "bytes", "--draft", "bytes"]
    done = subprocess.run(
        [*command, "--repeats", "1", "--new-tokens", "24"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["recompilations_after_warm_up"] == 0
    assert figures["outputs_equal_to_plain"] == "3 of 3"
    speeds = figures["tokens_per_second"]
    assert all(0 < speeds[name]["low"] <= speeds[name]["median"] <= speeds[name]["high"] for name in speeds)
    assert set(speeds) == {"dflash", "plain", "hf"} and 0 <= figures["host_share"] < 1
    assert figures["tau"]["low"] > 1


@pytest.mark.skipif(not (ROOT / ".venv" / "installed").exists(), reason="scripts/setup has not made this environment")
def test_demo_takes_a_prompt_and_options() -> None:
    command = ["scripts/demo", "--target", "bytes", "--max-new-tokens", "8", "def display_name(self):"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.startswith("\n    ") and "8 tokens" in done.stderr
