"""`torch-dflash train` as a command: bad input in one line, interruptions, full disks, several devices."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import BYTES_PAIR, GOLDEN
from safetensors.numpy import load_file

from torch_dflash import cli
from torch_dflash.config_reader import read_drafter_config
from torch_dflash.train import checkpoint
from torch_dflash.train.loop import CHECKPOINT, LOG
from torch_dflash.train.records import Answer, append_answers

SMALL = ["--layers", "1", "--taps", "2", "--block-size", "4"]
HEAD = ["--method", "eagle3", "--tap-layers", "0", "2", "4", "--ttt-length", "2"]
SECOND = [*SMALL, "--selector-rank", "6"]
ON_TOP = ["--start-from", str(BYTES_PAIR / "draft"), "--selector-rank", "6", "--distill", "0.5"]
SHORT = ["--rows", "2", "--anchors", "2", "--steps", "4", "--save-every", "2", "--dtype", "float32"]


def run_in(folder: Path, answers: list[Answer], shape: list[str] = SMALL) -> list[str]:
    """A run's folder whose answers are there already. Returns the command that trains in it."""
    folder.mkdir()
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [bytes(a.prompt_ids).decode()]}) + "\n" for a in answers))
    append_answers(folder / "answers.jsonl", answers)
    return ["train", str(prompts), "--target", str(BYTES_PAIR / "target"), *shape, *SHORT, "--out", str(folder)]


def some_answers(first: int = 97) -> list[Answer]:
    return [Answer(i, tuple(f"f{i}".encode()), tuple(first + (i * j) % 7 for j in range(20))) for i in range(4)]


def failing_write(number: int, error: BaseException) -> Callable[[int], None]:
    """An fsync that works until call `number`."""
    calls = 0

    def fsync(file: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error

    return fsync


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prompts.jsonl, line 2: is not JSON"),
        (["--eval-every", "2"], "--eval-every and --eval-prompts need each other"),
        (["--eval-prompts", "PROMPTS"], "--eval-every and --eval-prompts need each other"),
        (["--eval-every", "-1", "--eval-prompts", "PROMPTS"], "--eval-every is -1: use an integer >= 0"),
        (["--eval-every", "2", "--eval-prompts", "PROMPTS"], "prompts.jsonl, line 2: is not JSON"),
        (["--eval-every", "2", "--eval-prompts", "PROMPTS", "--eval-tokens", "1"], "--eval-tokens is 1"),
        (["--loss-weights", "dynamic", "--gamma", "3"], "--gamma is 3.0: dynamic loss weights do not decay"),
        (["--distill", "1.5"], "--distill is 1.5: use a share in 0..1"),
        (["--mesh", "0"], "--mesh is 0: use an integer >= 1"),
        (["--save-every", "0"], "--save-every is 0: use an integer >= 1"),
        (["--block-size", "1"], "--block-size is 1: use an integer >= 2"),
        (["--learning-rate", "nan"], "--learning-rate is nan: use a finite number above 0"),
        (["--train-seconds", "-5"], "--train-seconds is -5.0: use a finite number above 0"),
        (["--gamma", "0"], "--gamma is 0.0: use a finite number above 0"),
        (["--invent", "8"], "--invent, --rounds and --answer-tokens need --bulk or --accelerator"),
        (["--bulk", "--sampled", "-0.5"], "--sampled is -0.5: use a share in 0..1"),
        (["--start-from", "bytes", "--layers", "2"], "--layers is 2: the shape is that of --start-from, leave it out"),
        (["--start-from", "bytes", "--tap-layers", "1", "2"], "the taps are those of --start-from, leave it out"),
        (["--selector-top-k", "8"], "--selector-top-k is 8: it needs --selector-rank, or leave it out"),
        (["--selector-rank", "0"], "--selector-rank is 0: use an integer"),
        (["--selector-rank", "4", "--selector-top-k", "2000"], "--selector-top-k is 2000: use an integer in 1..1024"),
        (["--selector-rank", "4", "--method", "eagle3"], "--selector-rank is 4: it has no meaning for --method eagle3"),
        (
            ["--start-from", "bytes", "--method", "eagle3"],
            "--start-from is bytes: it has no meaning for --method eagle3",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["a"]}\n{"turns": \n')
    arguments = [str(prompts) if argument == "PROMPTS" else argument for argument in arguments]
    assert cli.main(["train", str(prompts), "--out", str(tmp_path / "run"), *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_target_without_a_free_mask_token(tmp_path: Path, capsys: pytest.CaptureFixture):
    command = run_in(tmp_path / "run", some_answers(first=257))  # the special tokens are 256..263
    assert cli.main(command) == 2
    assert "no special token that its texts never contain: give --mask-token-id" in capsys.readouterr().err


def test_a_drafter_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture):
    """--start-from: with hardly a learning rate the drafter comes out as it went in, in bfloat16; otherwise nothing but
    weights changes, and a folder is not gone on from with another start."""
    draft = BYTES_PAIR / "draft"
    command = run_in(tmp_path / "run", some_answers(), ["--start-from", str(draft)])
    assert cli.main([*command, "--learning-rate", "1e-30"]) == 0
    same, before = load_file(tmp_path / "run" / "drafter" / "model.safetensors"), load_file(draft / "model.safetensors")
    assert same.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(same[name], value.astype(ml_dtypes.bfloat16), err_msg=name)
    command = run_in(tmp_path / "other", some_answers(), ["--start-from", str(draft)])
    assert cli.main(command) == 0
    assert read_drafter_config(tmp_path / "other" / "drafter") == read_drafter_config(draft)
    moved = load_file(tmp_path / "other" / "drafter" / "model.safetensors")
    assert all((moved[name] != same[name]).any() for name in before if name.endswith("proj.weight"))
    capsys.readouterr()
    again = shutil.copytree(draft, tmp_path / "again")
    command[command.index("--start-from") + 1] = str(again)
    assert cli.main(command) == 2
    assert f"was trained with start_from {draft} (now {again}); use the same options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (GOLDEN / "qwen3-swa" / "draft", "drafter layer 0 is causal; only full attention can be trained"),
        (GOLDEN / "qwen3-gqa" / "draft", "hidden_size"),
        (Path("nowhere"), "nowhere"),
    ],
)
def test_drafters_that_cannot_be_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture, draft: Path, message: str):
    target = draft.parent / "target" if "causal" in message else BYTES_PAIR / "target"
    command = run_in(tmp_path / "run", [Answer(0, (1, 2), (3, 4, 5, 6, 7))] * 2, ["--start-from", str(draft)])
    command[command.index("--target") + 1] = str(target)
    answers = tmp_path / "run" / "answers.jsonl"
    answers.unlink()
    assert cli.main(command) == 2
    printed = capsys.readouterr().err
    assert message in printed.splitlines()[-1] and "Traceback" not in printed
    assert not answers.exists()  # found before any is written


@pytest.mark.parametrize("shape", [SMALL, HEAD, SECOND, ON_TOP], ids=["dflash", "eagle3", "dflash2", "selector"])
def test_an_interrupted_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture, shape: list[str]):
    """Interrupted while it writes features, the second checkpoint, the drafter; the disk full in between. The last run
    ends with the bytes of one that nobody disturbed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.main(run_in(whole, some_answers(), shape)) == 0
    command = run_in(killed, some_answers(), shape)

    def disturbed(write: int, error: BaseException) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint.os, "fsync", failing_write(write, error))
            return cli.main(command)

    assert disturbed(1, KeyboardInterrupt()) == 130
    assert not (killed / "features.json").exists()
    assert disturbed(4, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == 2
    assert "step 4 cannot be written (No space left on device)" in capsys.readouterr().err
    before = (killed / CHECKPOINT).read_bytes()
    assert disturbed(2, KeyboardInterrupt()) == 130
    assert (killed / CHECKPOINT).read_bytes() == before
    assert disturbed(3, KeyboardInterrupt()) == 130
    assert not (killed / "drafter" / "model.safetensors").exists()
    assert cli.main(command) == 0
    for name in ("drafter/model.safetensors", "drafter/config.json", CHECKPOINT):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    logs = [[json.loads(line) | {"seconds": 0} for line in (f / LOG).read_text().splitlines()] for f in (whole, killed)]
    assert logs[0] == logs[1]


def test_a_full_disk_while_features_are_reserved(tmp_path: Path, capsys: pytest.CaptureFixture):
    def full(*where: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    command = run_in(tmp_path / "run", some_answers())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert cli.main(command) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert f"--out {tmp_path / 'run'}" in printed
    assert "No space left on device" in printed


def test_rows_spread_over_a_mesh(tmp_path: Path):
    """--mesh 2 gives the losses of one device and decodes held-out prompts alike, for a new drafter and for a selector
    on top of another; needs a process of its own for the second device."""
    script = Path(__file__).parent / "mesh_training.py"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, script, tmp_path]
    done = subprocess.run(
        command, env=os.environ | flags, capture_output=True, text=True, cwd=script.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    alone, spread, (odd, many) = runs[:2], runs[2:4], runs[4:]
    for one, two in zip(alone, spread, strict=True):
        assert (one["code"], one["devices"], two["code"], two["devices"]) == (0, 1, 0, 2)
        for name in ("loss", "tau", "accuracy"):
            assert one["log"][name] == pytest.approx(two["log"][name], rel=1e-4)
        assert one["held_out"] == two["held_out"]
    assert odd["code"] == many["code"] == 2
    assert "--rows is 3: use a multiple of --mesh, 2" in done.stderr
    assert "--mesh is 3: this machine has 2 device(s), use 1..2" in done.stderr
