"""`torch-dflash bench` as a person meets it: a run, its files, an interruption, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import BYTES_PAIR
from matplotlib.image import imread
from torch import float32
from transformers import PreTrainedTokenizerFast

import torch_dflash
from torch_dflash.bench.datasets import NAMED, OWN, Dataset, read_datasets
from torch_dflash.bench.hub_datasets import FORM
from torch_dflash.bench.runner import Bench, check_thinking, requests_of
from torch_dflash.cli import main
from torch_dflash.errors import InputError
from torch_dflash.pair import load_drafter, load_eagle3, load_target
from torch_dflash.reference import dflash, greedy
from torch_dflash.reference_eagle import eagle3
from torch_dflash.train.export import export
from torch_dflash.train.start import make_head_trainer
from torch_dflash.train.trainer import TrainPlan
from torch_dflash.train.warm_start_eagle import head_config

TEXTS = ("def f(self):", "import os", "class Stack:")  # short: one width of prefill to compile
OTHERS = ("import sys\n", "def is_ok(name):", "for key in", "never asked")
BENCH = ["bench", "--target", "bytes"]
SHAPE = ["--rows", "2", "--max-new-tokens", "24"]  # of most runs here, so that each program is compiled once
PNGS = ("speed-up.png", "positional-decay.png", "accept-histogram.png")


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory):
    """The user's cache is left alone; each program is compiled once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DFLASH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


def write_prompts(folder: Path, *texts: str, name: str = "python.jsonl") -> str:
    """The second turn must never be asked."""
    path = folder / name
    path.write_text("".join(json.dumps({"turns": [text, "second"]}) + "\n" for text in texts))
    return str(path)


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "batches.jsonl").read_text().splitlines()]


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a Markdown text, rows as mappings. Every row must have the head's number of cells."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            head, rule, *body = rows
            assert set(rule) == {"---"} and {len(row) for row in rows} == {len(head)}
            found.append([dict(zip(head, row, strict=True)) for row in body])
            rows = []
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of two files of three prompts, two at a time, and its command."""
    folder = tmp_path_factory.mktemp("bench")
    sets = f"{write_prompts(folder, *TEXTS)},{write_prompts(folder, *OTHERS, name='other.jsonl')}"
    command = [*BENCH, "--dataset", sets, *SHAPE, "--max-samples", "3", "--out", str(folder / "run")]
    assert main(command) == 0
    return folder / "run", command


def test_every_method_writes_what_the_oracle_writes(finished: tuple[Path, list[str]]) -> None:
    """Tokens and accept counts, prompt by prompt: nothing is lost or mixed up between rows, batches and sets."""
    texts = {"python": TEXTS, "other": OTHERS[:3]}
    target = load_target(BYTES_PAIR / "target", float32)[1]
    config, drafter = load_drafter(BYTES_PAIR / "draft", float32)
    for name, some in texts.items():
        batches = [line for line in lines_of(finished[0]) if line["dataset"] == name]
        assert [batch["first"] for batch in batches] == [0, 2]
        found = {m: [outcome for batch in batches for outcome in batch["outcomes"][m]] for m in ("plain", "dflash")}
        for text, plain, own in zip(some, found["plain"], found["dflash"], strict=True):
            ids, trace = dflash(target, drafter, config, text.encode(), 24)
            assert plain["token_ids"] == own["token_ids"] == ids == greedy(target, text.encode(), 24)
            assert own["accepted"] == [entry.accepted for entry in trace] and plain["accepted"] == [0] * 23
            assert plain["prompt_tokens"] == own["prompt_tokens"] == len(text)
            assert plain["divergence"] is own["divergence"] is None


def test_clocks_hold_together(finished: tuple[Path, list[str]]) -> None:
    for number, batch in enumerate(lines_of(finished[0])):
        assert set(batch["outcomes"]) == {"plain", "dflash"}
        for method, outcomes in batch["outcomes"].items():
            for outcome in outcomes:
                assert outcome["ttft"] > 0 and outcome["decode_seconds"] > 0
                assert outcome["ttft"] + outcome["decode_seconds"] <= batch["seconds"][method] + 1e-9
            assert (batch["warm_up"][method] > 0) == (number in (0, 2)), "before each set's first batch"


def test_the_report_is_the_batches(finished: tuple[Path, list[str]]) -> None:
    """Figures of one set by a slow twin, from the lines as they stand in the file; the table shows the same numbers."""
    folder, _ = finished
    document = json.loads((folder / "report.json").read_text())
    (own,) = [r for r in document["results"] if (r["dataset"], r["method"]) == ("python", "dflash")]
    tokens = {"plain": 0, "dflash": 0}
    seconds = {"plain": 0.0, "dflash": 0.0}
    accepted: list[int] = []
    for batch in lines_of(folder):
        if batch["dataset"] == "python":
            for method in tokens:
                for outcome in batch["outcomes"][method]:
                    tokens[method] += len(outcome["token_ids"]) - 1
                    seconds[method] += outcome["decode_seconds"]
            accepted += [a for outcome in batch["outcomes"]["dflash"] for a in outcome["accepted"]]
    assert own["tau"] == pytest.approx(tokens["dflash"] / len(accepted))
    assert own["accept_histogram"] == [accepted.count(a) for a in range(16)]
    assert own["acceptance"] == pytest.approx([sum(a >= k for a in accepted) / len(accepted) for k in range(1, 16)])
    ratio = (seconds["plain"] / tokens["plain"]) / (seconds["dflash"] / tokens["dflash"])
    assert own["speed_up"]["ratio"] == pytest.approx(ratio)
    assert own["speed_up"]["low"] <= ratio <= own["speed_up"]["high"]
    assert own["equality"] == {"equal": 3, "prompts": 3, "positions": [], "gaps": []}
    main_rows, acceptance, histogram = tables((folder / "report.md").read_text())
    assert [row["set"] for row in main_rows] == [s for s in ("python", "other", "all sets") for _ in range(2)]
    assert main_rows[1]["tau"] == f"{own['tau']:.2f}" and main_rows[1]["equal to plain"] == "3/3"
    assert main_rows[1]["speed-up (95%)"].startswith(f"{ratio:.2f} (")
    assert acceptance[0]["k = 1"] == f"{own['acceptance'][0]:.3f}"
    assert [histogram[0][f"a = {a}"] for a in range(16)] == [str(count) for count in own["accept_histogram"]]
    assert document["settings"]["method"] == ["plain", "dflash"] and len(document["environment"]["git"]) >= 7
    assert document["definitions"]["tau"] in (folder / "report.md").read_text()


def test_pictures_show_something(finished: tuple[Path, list[str]]) -> None:
    for name in PNGS:
        picture = imread(finished[0] / name)
        assert picture.shape[0] > 300 and picture.std() > 0.01, name


def test_a_finished_run_only_reports(finished: tuple[Path, list[str]], capsys: pytest.CaptureFixture) -> None:
    """Nothing is measured or loaded again, and --json prints the document that the file holds."""
    folder, command = finished
    before = (folder / "batches.jsonl").read_bytes(), json.loads((folder / "report.json").read_text())["results"]
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document == json.loads((folder / "report.json").read_text())
    assert before == ((folder / "batches.jsonl").read_bytes(), document["results"])
    assert "load target" not in printed.err


def test_other_arguments_in_the_same_folder(finished: tuple[Path, list[str]], capsys: pytest.CaptureFixture) -> None:
    folder, command = finished
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main([*command, "--rows", "1", "--seed", "5", "--method", "dflash"]) == 2
    printed = capsys.readouterr().err
    for change in ("rows was 2, now 1", "seed was 0, now 5", 'method was ["plain", "dflash"], now ["dflash"]'):
        assert change in printed
    assert printed.count("\n") == 1 and "max_new_tokens" not in printed
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def figures_without_times(folder: Path) -> list[dict]:
    names = ("dataset", "method", "prompts", "new_tokens", "steps", "tau", "accept_histogram", "equality")
    results = json.loads((folder / "report.json").read_text())["results"]
    return [{name: result[name] for name in names} for result in results]


def measured(folder: Path) -> bytes:
    """What a run has written so far."""
    path = folder / "batches.jsonl"
    return path.read_bytes() if path.exists() else b""


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Killed by the system while it measures, its last line cut off: the next run keeps the whole lines, and ends with
    the figures of one that nobody disturbed."""
    texts = [f"{text}{i}" for i in range(30) for text in TEXTS]
    common = [*BENCH, "--dataset", write_prompts(tmp_path, *texts), *SHAPE, "--max-samples", "90"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert main([*common, "--out", str(whole)]) == 0
    command = [sys.executable, "-m", "torch_dflash.cli", *common, "--out", str(killed)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ) as process:
        while process.poll() is None and b"\n" not in measured(killed):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    lines = measured(killed)
    assert 0 < lines.count(b"\n") < 45 and not (killed / "report.json").exists()
    with (killed / "batches.jsonl").open("ab") as file:
        file.write(b'{"dataset": "pyth')
    assert main([*common, "--out", str(killed)]) == 0
    assert measured(killed).startswith(lines[: lines.rfind(b"\n") + 1])
    assert figures_without_times(killed) == figures_without_times(whole)
    assert [line["first"] for line in lines_of(killed)] == list(range(0, 90, 2))


def test_without_plain_nothing_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = [*SHAPE, "--method", "dflash", "--out", str(tmp_path / "run"), "--num-drafts", "3"]
    assert main([*BENCH, "--dataset", write_prompts(tmp_path, *TEXTS), *options]) == 0
    (row,), *_ = tables(capsys.readouterr().out)
    assert list(row) == ["set", "method", "prompts", "tau", "TTFT ms", "TPOT ms", "tokens/s"]
    assert not (tmp_path / "run" / "speed-up.png").exists() and (tmp_path / "run" / PNGS[1]).exists()
    assert lines_of(tmp_path / "run")[0]["num_drafts"] == {"dflash": 3}
    assert max(a for line in lines_of(tmp_path / "run") for a in line["outcomes"]["dflash"][0]["accepted"]) == 3


def test_two_drafters_race_on_one_target(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """EAGLE-3 beside DFlash and plain decoding; each proposes what it does alone, and all write the same."""
    write_head(tmp_path / "head")
    texts, run = write_prompts(tmp_path, *TEXTS), tmp_path / "run"
    options = [*SHAPE, "--method", "plain,dflash,eagle3", "--eagle3-head", str(tmp_path / "head"), "--out", str(run)]
    assert main([*BENCH, "--dataset", texts, *options, "--eagle3-num-drafts", "3"]) == 0
    rows, *_ = tables(capsys.readouterr().out)
    assert [(row["method"], row["equal to plain"]) for row in rows] == [
        *(("plain", "-"), ("dflash", "3/3"), ("eagle3", "3/3")),
    ]
    assert lines_of(run)[0]["num_drafts"] == {"plain": 0, "dflash": 15, "eagle3": 3}
    config, target = load_target(BYTES_PAIR / "target", float32)
    head_config, head = load_eagle3(tmp_path / "head", config, float32)
    outcomes = [outcome for batch in lines_of(run) for outcome in batch["outcomes"]["eagle3"]]
    for text, outcome in zip(TEXTS, outcomes, strict=True):
        ids, trace = eagle3(target, head, head_config, text.encode(), 24, 3)
        assert outcome["token_ids"] == ids and outcome["accepted"] == [entry.accepted for entry in trace]
    assert main([*BENCH, "--dataset", texts, *options, "--eagle3-num-drafts", "2"]) == 2
    assert "eagle3_num_drafts was 3, now 2" in capsys.readouterr().err


def write_head(folder: Path) -> None:
    """A head that has learnt nothing: it begins as training begins."""
    pair = torch_dflash.load_pair("bytes", None)
    ids, config = np.arange(200, dtype=np.int32), head_config(pair.target.config, (0, 2, 4), 200)
    trainer, state = make_head_trainer(config, ids, 6, pair.params["target"], TrainPlan(ttt_length=1))
    export(config, state.params | trainer.buffers, folder)


KNOWN = ", ".join((*OWN, *NAMED))
UNKNOWN = f"--dataset 'gsm9k' is neither a file nor a known set: use a file of JSON lines, {FORM}, or one of {KNOWN}"
NOWHERE = f"no alpaca.jsonl and alpaca80.jsonl in --data DATA; put it there, or use a file or one of {KNOWN}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "gsm9k"], UNKNOWN),
        (["--dataset", ""], "--dataset '' is neither a file nor a known set"),
        (["--dataset", "gsm8k"], "--dataset gsm8k does not ship: --data FOLDER says where gsm8k.jsonl is"),
        (["--dataset", "alpaca", "--data", "DATA"], NOWHERE),
        (["--dataset", "hub:openai/gsm8k"], f"--dataset hub:openai/gsm8k: it must look like {FORM}"),
        (["--dataset", "code,code"], "--dataset has 'code' twice"),
        (["--dataset", "aime24", "--data", "DATA"], "--dataset aime24: DATA/aime24.jsonl is empty, give at least one"),
        (["--dataset", "mbpp", "--data", "DATA"], "DATA/mbpp.jsonl, line 2: is not JSON"),
        (["--method", "plain,medusa"], "--method 'medusa' is unknown: use plain, dflash, eagle3"),
        (["--method", "plain,plain"], "--method has 'plain' twice"),
        (["--max-samples", "0"], "--max-samples is 0: use an integer >= 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens is 1: use an integer >= 2 (prefill gives the first)"),
        (["--rows", "0"], "--rows is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--steps-per-dispatch", "0"], "--steps-per-dispatch is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--draft", "none"], "--method dflash needs a drafter, and --draft is none"),
        (["--target", "somewhere"], "--draft is missing"),
        (["--num-drafts", "many"], "--num-drafts is 'many'"),
        (["--num-drafts", "3", "--method", "plain"], "--num-drafts is 3, and --method has no dflash: leave it out"),
        (["--method", "plain,eagle3"], "--method eagle3 needs a head: --eagle3-head names it, or leave the method out"),
        (["--eagle3-head", "HEAD"], "--eagle3-head is HEAD, and --method has no eagle3: leave it out"),
        (["--eagle3-num-drafts", "2"], "--eagle3-num-drafts is 2, and --method has no eagle3: leave it out"),
        (["--thinking", "--no-chat"], "--thinking has no meaning beside --no-chat"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "aime24.jsonl").write_text("\n")
    (tmp_path / "mbpp.jsonl").write_text('{"turns": ["a"]}\n{"turns": \n')
    there = [argument.replace("DATA", str(tmp_path)) for argument in arguments]
    assert main([*BENCH, *there, "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert message.replace("DATA", str(tmp_path)) in printed
    assert printed.count("\n") == 1 and not (tmp_path / "run").exists()


def test_what_only_the_models_can_refuse(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A folder that nothing was measured in belongs to nobody: the right command may still use it."""
    command = [*BENCH, "--dataset", write_prompts(tmp_path, *TEXTS[::2], "b" * 3000), *SHAPE]
    command += ["--out", str(tmp_path / "run")]
    assert main(command) == 2
    assert f"{tmp_path / 'python.jsonl'}, line 3: prompt has 3000 tokens and the target's" in capsys.readouterr().err
    assert main([*command, "--num-drafts", "16", "--max-samples", "2"]) == 2
    assert "num_drafts is 16: use an integer in 1..15" in capsys.readouterr().err
    other = [*command, "--max-samples", "2", "--method", "eagle3", "--eagle3-head"]
    assert main([*other, str(BYTES_PAIR / "draft")]) == 2
    assert "an EAGLE-3 head has LlamaForCausalLMEagle3" in capsys.readouterr().err
    assert main([*other, str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main([*command, "--thinking"]) == 2
    assert "the target's chat template has no enable_thinking: leave it out" in capsys.readouterr().err
    assert main([*command, "--max-samples", "2"]) == 0


def test_the_template_is_applied_once_and_knows_the_switch() -> None:
    template = "<{{ 'T' if enable_thinking else 'N' }}{{ messages[0]['content'] }}>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(BYTES_PAIR / "target" / "tokenizer.json"), chat_template=template, eos_token="<|endoftext|>"
    )
    pair = replace(torch_dflash.load_pair("bytes", "bytes"), tokenizer=tokenizer)
    asked = Dataset("one", "one.jsonl", ("abc",))
    bench = Bench(("plain",), 1, 8, 0.0, 0, {}, 4, chat=True, thinking=False)
    for changed, text in (({}, b"<Nabc>"), ({"thinking": True}, b"<Tabc>"), ({"chat": False}, b"abc")):
        own = replace(bench, **changed)
        check_thinking(pair, own)
        assert bytes(requests_of(pair, asked, own)[0].prompt_ids) == text
    drawn = requests_of(pair, replace(asked, prompts=("a", "b")), replace(bench, temperature=0.5, seed=2**64 - 1))
    assert [(request.sampling.temperature, request.sampling.seed) for request in drawn] == [(0.5, 2**64 - 1), (0.5, 0)]
    with pytest.raises(InputError, match="no enable_thinking"):
        plain_template = replace(pair, tokenizer=torch_dflash.load_pair("bytes", None).tokenizer)
        check_thinking(plain_template, replace(bench, thinking=True))


def test_named_sets_are_found_under_either_name(tmp_path: Path) -> None:
    for name in ("gsm8k.jsonl", "alpaca80.jsonl", "swe_samples.jsonl"):
        write_prompts(tmp_path, name, "other", name=name)
    found = read_datasets(["gsm8k", "alpaca", "swe-bench"], tmp_path, 1)
    assert [(d.name, d.prompts) for d in found] == [
        *(("gsm8k", ("gsm8k.jsonl",)), ("alpaca", ("alpaca80.jsonl",)), ("swe-bench", ("swe_samples.jsonl",))),
    ]
    shipped = read_datasets(OWN, None, 100)
    assert [len(dataset.prompts) for dataset in shipped] == [6] * len(OWN)
