"""scripts/study.py as a person meets it, on the small pair: each study once, and what is refused."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.image import imread

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import study

from torch_dflash.cli import main as torch_dflash

TEXTS = ("def f(self):", "import os", "class Stack:", "def is_ok(name):")
PAIR = ["--target", "bytes", "--draft", "bytes"]
TOKENS = 40


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory):
    """The user's cache is left alone; each program is compiled once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DFLASH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "python.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def bench(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Greedy float32 runs, each made once."""
    made: dict[tuple[str, ...], Path] = {}

    def run(*options: str) -> Path:
        if options not in made:
            folder = made[options] = tmp_path_factory.mktemp("bench") / "run"
            shape = ["--max-new-tokens", str(TOKENS), "--out", str(folder)]
            command = ["bench", "--target", "bytes", "--dataset", str(prompts), *shape, "--method", "dflash", *options]
            assert torch_dflash(command) == 0
        return made[options]

    return run


def whole(folder: Path, name: str, command: list[str]) -> dict:
    """The three files of a study; returns the JSON document's result."""
    assert study.main([*command, "--out", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for kind in ("md", "png", "json")}
    document = json.loads((folder / f"{name}.json").read_text())
    assert set(document) == {"settings", "environment", "began", "argv", "result"}
    assert document["environment"]["git"] and document["environment"]["packages"]["jax"]
    assert imread(folder / f"{name}.png").std() > 0
    assert document["result"]["definitions"]
    return document["result"]


def test_cutting_off_is_decoding_with_fewer_drafts(bench: Callable[..., Path], tmp_path: Path) -> None:
    """In float32, at every anchor that both runs have behind the same text: min(a, K) drafts are accepted."""
    fewer = [str(bench("--num-drafts", k)) for k in ("3", "7")]
    result = whole(tmp_path / "out", "tau-of-k", ["tau-of-k", str(bench()), "--check", *fewer])
    assert [check["num_drafts"] for check in result["checks"]] == [3, 7]
    for check in result["checks"]:
        assert check["same_anchors"] >= 2 * len(TEXTS) and check["agreeing"] == check["same_anchors"]
        assert check["decoded"] == pytest.approx(check["truncated"], rel=0.35)
    (own,) = result["sets"]
    assert len(own["measured"]) == 15 and own["measured"] == sorted(own["measured"])
    batches = [json.loads(line) for line in (bench() / "batches.jsonl").read_text().splitlines()]
    accepted = [a for batch in batches for a in batch["outcomes"]["dflash"][0]["accepted"]]
    assert own["steps"] == len(accepted)
    assert own["measured"][2] == 1 + sum(min(a, 3) for a in accepted) / len(accepted)


def test_decay_runs(bench: Callable[..., Path], tmp_path: Path) -> None:
    result = whole(tmp_path / "out", "decay", ["decay", str(bench())])
    (own,) = result["sets"]
    assert own["dataset"] == "python" and own["prompts"] == len(TEXTS)
    assert own["share"] == sorted(own["share"], reverse=True) and 1 < own["tau"] < 16
    assert "| python | 4 |" in (tmp_path / "out" / "decay.md").read_text()


def test_verify_cost_runs(tmp_path: Path) -> None:
    shape = ["--tokens", "3", "--rows", "2", "--dtype", "float32", "--context", "20", "--repeats", "2"]
    result = whole(tmp_path / "out", "verify-cost", ["verify-cost", *PAIR, *shape])
    assert [(p["rows"], p["tokens"]) for p in result["points"]] == [(2, 1), (2, 3)]
    assert result["points"][0]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert {entry["chip"] for entry in result["tpu"]} == {"v5p", "v6e", "v5e"}
    text = (tmp_path / "out" / "verify-cost.md").read_text()
    assert "model estimates, nothing measured" in text


def test_cost_model_runs(prompts: Path, tmp_path: Path) -> None:
    command = ["cost-model", *PAIR, "--dtype", "float32", "--dataset", str(prompts), "--max-samples", "2"]
    result = whole(tmp_path / "out", "cost-model", [*command, "--max-new-tokens", str(TOKENS)])
    (own,) = result["sets"]
    assert own["prompts"] == 2 and own["measured"] > 0 and own["low"] <= own["measured"] <= own["high"]
    (raw,) = result["measured"]
    assert len(raw["batches"]) == 2 and len(raw["rounds"]) == 4
    assert own["tau"] > 1 and set(own["in_race"]) == {"plain", "dflash"}
    assert all({"draft", "verify", "dflash"} <= set(parts) for parts in list(own["costs"].values())[:1])


def changed(run: Path, to: Path, **settings: object) -> str:
    """A copy of a run that says it was made with other settings."""
    shutil.copytree(run, to)
    about = json.loads((to / "settings.json").read_text())
    (to / "settings.json").write_text(json.dumps(about | {"settings": about["settings"] | settings}))
    return str(to)


def test_bad_input_is_one_line(bench: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, k3 = str(bench()), str(bench("--num-drafts", "3"))
    drawn = changed(bench(), tmp_path / "drawn", temperature=0.5)
    auto = changed(bench(), tmp_path / "auto", num_drafts="auto")
    other = changed(bench("--num-drafts", "3"), tmp_path / "other", max_samples=2)
    plain = Path(changed(bench(), tmp_path / "plain")) / "batches.jsonl"
    plain.write_text(plain.read_text().replace('"dflash"', '"plain"'))
    short = Path(changed(bench(), tmp_path / "short")) / "batches.jsonl"
    short.write_text(re.sub(r'"accepted": \[[^]]*\]', '"accepted": []', short.read_text()))
    (tmp_path / "empty").mkdir()
    cases = {
        ("decay", "nowhere"): "RUN nowhere: has no results (batches.jsonl); give the --out folder",
        ("decay", str(tmp_path / "empty")): "has no results",
        ("tau-of-k", drawn): "temperature is 0.5; use a greedy run",
        ("tau-of-k", auto): "num_drafts is auto",
        ("decay", str(plain.parent)): "has no accept counts of dflash; use a run with --method dflash",
        ("decay", str(short.parent)): "set python has no verify steps, so no accept counts; use longer answers",
        ("tau-of-k", run, "--check", run): "has 15 drafts; use a run with fewer than 15",
        ("tau-of-k", run, "--check", other): "max_samples is not that of",
        ("tau-of-k", k3, "--check", run): "has 15 drafts; use a run with fewer than 3",
        ("verify-cost", "--tokens", "0"): "--tokens is 0: use an integer >= 1",
        ("verify-cost", "--rows", "-1"): "--rows is -1: use an integer >= 1",
        ("verify-cost", "--repeats", "0"): "--repeats is 0: use an integer >= 1",
        ("verify-cost", *PAIR, "--context", "3000"): "positions are used, the target has 2048",
        ("verify-cost", "--target", "nowhere/at-all/no"): "nowhere/at-all/no",
        ("cost-model", "--max-new-tokens", "1"): "--max-new-tokens is 1: use an integer >= 2",
        ("cost-model", "--dataset", "gsm8k"): "--data FOLDER says where gsm8k.jsonl is",
        ("cost-model", *PAIR, "--dataset", "nowhere"): "is neither a file nor a known set",
    }
    capsys.readouterr()
    for arguments, said in cases.items():
        assert study.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
    taken = tmp_path / "file"
    taken.write_text("")
    assert study.main(["decay", run, "--out", str(taken)]) == 2
    assert "cannot be written" in capsys.readouterr().err
