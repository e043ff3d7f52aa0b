"""scripts/compare_peers: the driver with this project's own workers, on the small pair, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAIR = ("--target", "bytes", "--draft", "bytes")


def compare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/peers/compare.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "code.jsonl"
    path.write_text('{"turns": ["import os"]}\n{"turns": ["class Stack:"]}\n{"turns": ["def f("]}\n')
    return path


def test_table_and_json_agree(prompts: Path, tmp_path: Path) -> None:
    numbers = ("--new-tokens", "24", "--repeats", "2", "--per-set", "2", "--threads", "1", "--others", "1")
    done = compare(prompts, *PAIR, "--peers", "dflash,plain", *numbers, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["answers"]) == 2 * 2 * 2 and len(result["prompts"]) == 2
    dflash, plain = (result["figures"][name] for name in ("dflash", "plain"))
    assert (dflash["equal"], plain["equal"], plain["tau"]) == (1, 1, 1) and dflash["tau"] > 1.5
    assert set(dflash["ratio"].values()) == {1} and plain["ratio"]["low"] <= plain["ratio"]["high"]
    assert result["turns"] == "4 of 4 turns counted"
    for answer in result["answers"]:
        assert 0 <= answer["others"] <= 1
        assert 0 < len(answer["token_ids"]) <= 24 and answer["seconds"] > 0 and answer["steps"] > 0
    table = (tmp_path / "table.md").read_text()
    assert f"| {dflash['tau']:.2f} | 100% | {result['processes']['dflash']['peak_bytes'] >> 20} |" in table
    assert f"{plain['tokens_per_second']['median']:.1f} (" in table and "| code |" in table
    assert table in done.stdout and not list(tmp_path.glob("*.new"))


def test_what_cannot_be_compared_is_one_line(prompts: Path, tmp_path: Path) -> None:
    cases = {
        ("--peers", "dflash,eagle"): 'names "eagle", which is unknown: use some of original, hf, hf-dflash, dflash',
        ("--peers", "dflash,dflash"): 'names "dflash" twice',
        ("--repeats", "0"): "--repeats is 0: use an integer >= 1",
        ("--threads", "4096"): "--threads is 4096: use an integer in 1..",
        ("--others", "2"): "--others is 2.0: use a share",
        ("--new-tokens", "9999"): "lower --new-tokens",
    }
    for arguments, said in cases.items():
        done = compare(prompts, *PAIR, "--out", tmp_path, *arguments)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_missing_environment_is_one_line(prompts: Path, tmp_path: Path) -> None:
    done = compare(prompts, *PAIR, "--peers", "dflash,hf", "--environments", tmp_path / "none", "--out", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f'peer "hf": {tmp_path / "none" / "hf"} is missing or out of date; make it with --make' in done.stderr


def test_a_worker_that_dies_is_one_line(prompts: Path, tmp_path: Path) -> None:
    """An environment that says it is finished, while its packages are gone."""
    place = tmp_path / "hf"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (place / "installed").write_text("torch==2.13.0+cpu\ntransformers==5.24.0\n")
    done = compare(prompts, *PAIR, "--peers", "hf", "--environments", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "ended with exit code 1 (ModuleNotFoundError: No module named 'torch')" in done.stderr
