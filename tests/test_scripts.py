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


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)


def test_throughput_ends_with_one_json_line(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["import os"]}\n{"turns": ["def f("]}\n')
    pair = ["--target", "bytes", "--draft", "bytes", "--dtype", "float32"]
    done = run("scripts/throughput.py", str(prompts), *pair, "--rows", "2", "--new-tokens", "16", "--repeats", "2")
    speeds = json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]["2"]
    assert set(speeds) == {"dflash", "plain", "auto"} and all(len(s) == 2 and min(s) > 0 for s in speeds.values())
    assert "auto/better" in done.stdout


def test_soak_plays_a_schedule() -> None:
    figures = json.loads(run("scripts/soak.py", "1", "--seed", "5", "--only").stdout.splitlines()[-1])
    assert figures["schedules"] == 1 and figures["mismatches"] == 0 and figures["tokens"] > 0


def test_mutation_check_catches_a_fault() -> None:
    done = run("scripts/mutation_check.py", "acceptance by count")
    assert "tests/test_" in done.stdout and "every fault is caught" in done.stdout


@pytest.mark.skipif(not (ROOT / ".venv" / "installed").exists(), reason="scripts/setup has not made this environment")
def test_demo_takes_a_prompt_and_options() -> None:
    command = ["scripts/demo", "--target", "bytes", "--max-new-tokens", "8", "def display_name(self):"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.startswith("\n    ") and "8 tokens" in done.stderr


@pytest.mark.parametrize(("temperature", "tau", "share"), [("1e-6", "11.50", "1.00"), ("1000", "1.00", "0.00")])
def test_the_bound_of_likeliest_tokens(tmp_path: Path, temperature: str, tau: str, share: str) -> None:
    """Drawn nearly greedily, 23 tokens take 2 steps of 16; of 264 ids nearly equally likely, each step keeps one."""
    prompts = tmp_path / "python.jsonl"
    prompts.write_text('{"turns": ["import os"]}\n')
    pair = ["--target", "bytes", "--draft", "bytes", "--dtype", "float32"]
    pair += ["--max-new-tokens", "24", "--temperature", temperature]
    done = run("scripts/likeliest_bound.py", str(prompts), *pair)
    bound = f"  likeliest tokens: tau at most {tau}; {share} of 23 drawn were the likeliest"
    assert done.stdout.splitlines()[1] == bound and done.stdout.startswith("python  ")


def test_the_cost_of_a_proposal_hardly_grows() -> None:
    """Ours by attention alone; that of a proposer which keeps nothing by all of the context's projections."""
    pair = ["--target", "bytes", "--draft", "bytes", "--dtype", "float32", "--repeats", "1"]
    done = run("scripts/vllm_cost.py", *pair, "--contexts", "64", "512")
    short, long = (row["flops"] for row in json.loads(done.stdout.splitlines()[-1])["table"])
    grown = {name: long[name] - short[name] for name in short}
    assert 0 < 4 * grown["ours"] < grown["stateless"]


def test_picked_prompts_are_short_and_as_many_of_each_file(tmp_path: Path) -> None:
    for name in "ab":
        lines = [json.dumps({"turns": [f"{name}{i} " + "x" * (40 * (i % 2))]}) for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    options = ["--target", "bytes", "--each", "3", "--most-tokens", "10"]
    picked, again = (run("scripts/pick_prompts.py", *files, *options).stdout for _ in range(2))
    texts = [json.loads(line)["turns"][0] for line in picked.splitlines()]
    assert picked == again and [text[0] for text in texts] == ["a"] * 3 + ["b"] * 3
    assert len(set(texts)) == 6 and max(map(len, texts)) <= 10
