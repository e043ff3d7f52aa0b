"""`torch-dflash tpu-report`: the report, its JSON, its files and its refusals."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import TARGET, write_drafter, write_target

from torch_dflash import engine
from torch_dflash.cli import main
from torch_dflash.config_reader import read_drafter_config, read_target_config
from torch_dflash.errors import InputError
from torch_dflash.tpu import published
from torch_dflash.tpu.chips import chip_named
from torch_dflash.tpu.hlo import Collective, Facts
from torch_dflash.tpu.plan import PAGE_SIZE, Setup, check_setup, plan_memory
from torch_dflash.tpu.report import DRAFT, FUSED, PLAIN, document, make_report, of_ideal
from torch_dflash.tpu.report_lines import lines
from torch_dflash.tpu.roofline import dflash_step, target_pass, time_of
from torch_dflash.tpu.shapes import drafter_folder, target_folder

NAMES = "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"
QWEN = read_target_config(target_folder(NAMES[0]))
QWEN_DRAFTER = read_drafter_config(drafter_folder(NAMES[1]))
SETUP = Setup(chip_named("v5p"), QWEN, QWEN_DRAFTER, tp=1, rows=1, context=512, tau=5.0)


def facts(cycles: float, **changes: Any) -> Facts:
    base = Facts(
        mosaic_calls=3,
        silent_mosaic_calls=1,
        argument_bytes=10**9,
        output_bytes=2 * 10**9,
        alias_bytes=1234 * 10**6,
        temp_bytes=7654 * 10**3,
        collectives=(Collective("all-reduce", 3, 72, 10**6), Collective("all-gather", 2, 2, 64)),
        large_copies=(),
        host_transfers=(),
        cycles=cycles,
        loops_counted_once=0,
        flops=164 * 10**9,
        hbm_bytes=10 * 10**9,
    )
    return replace(base, **changes)


def refusal(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """The one line that answers bad arguments."""
    assert main(["tpu-report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("torch-dflash: ") and err.count("\n") == 1
    return err


def row(text: str, name: str) -> list[str]:
    """The cells behind a line's name."""
    line = next(line for line in text.splitlines() if line.startswith(f"  {name} "))
    return line[len(name) + 2 :].split()


def test_the_default_report_is_qwen3_4b_on_v5p_beside_the_published_figures(capsys: pytest.CaptureFixture) -> None:
    assert main(["tpu-report"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 110
    assert text.startswith("Model estimates: nothing was measured on a TPU")
    assert "1 x TPU v5p" in text and "4.022 B parameters" in text and "0.537 B parameters of its own" in text
    assert row(text, PLAIN)[-1] == "2.937" and row(text, FUSED)[-1] == "3.613"
    assert row(text, "math500") == ["8.80", "8.02", "12.32", "1.40", "5.72", "0.41"]
    assert row(text, "average")[2] == "-"  # a mean step is not the mean TPOT times the mean tau
    assert "takes longer than the memory: v5p 162, v6e 546, v5e 235." in text


def test_json_is_the_same_report_unrounded(capsys: pytest.CaptureFixture) -> None:
    assert main(["tpu-report", "--json", "--chip", "V6E", "--tp", "4", "--rows", "8", "--tau", "4"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert "model estimates" in content["note"] and content["chip"]["name"] == "v6e"
    assert (content["tp"], content["rows"], content["context"], content["tau"]) == (4, 8, 512, 4.0)
    step = time_of(dflash_step(QWEN, QWEN_DRAFTER, 8, 512), chip_named("v6e"), 4)
    fused = next(program for program in content["roofline"] if program["name"] == FUSED)
    assert (fused["memory_seconds"], fused["compute_seconds"]) == (step.memory, step.compute)
    (predicted,) = content["predicted"]
    assert predicted["tpot_ms"] == pytest.approx(step.seconds * 1e3 / 4)
    assert content["published"]["comparable"] is False
    assert [curve["chip"] for curve in content["k_flat"]] == ["v6e", "v5p", "v5e"]
    for curve in content["k_flat"]:
        assert [point["tokens"] for point in curve["points"]] == [2**n for n in range(11)]
    assert content["compiled"] == [] and content["not_compiled"]


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["tpu-report", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert (out / "report.txt").read_text() == printed
    assert json.loads((out / "report.json").read_text())["k_flat"][0]["knee"] == 162
    assert (out / "k-flat.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert "name another folder" in refusal(capsys, "--out", str(tmp_path / "file"))


def test_without_matplotlib_the_picture_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "needs matplotlib: pip install matplotlib" in refusal(capsys, "--out", str(tmp_path))


def test_what_was_compiled_and_what_was_not() -> None:
    nothing = "\n".join(lines(make_report(NAMES, SETUP, not_compiled="no compiler here")))
    assert "not compiled: no compiler here" in nothing and "cycles" not in nothing
    compiled = (PLAIN, facts(7e6)), (FUSED, facts(14e6, loops_counted_once=1))
    report = make_report(NAMES, SETUP, compiled)
    text = "\n".join(lines(report))
    assert max(map(len, text.splitlines())) <= 110 and "not compiled" not in text
    section = text[text.index("compiled, each chip") :]
    assert row(section, FUSED) == ["10.000", "1.009", "164.0", "3", "7.7", "74", "8.000"]  # 14 Mcycles at 1.75 GHz
    assert "count once: fused step." in text
    assert row(text, "model estimate: cycles") == ["4.000", "8.000", "4.000", "1.600", "2.50"]
    assert row(text, "math500")[-2:] == ["0.41", "0.91"]
    content = document(report)
    assert content["not_compiled"] is None
    assert content["compiled"][1]["estimated_seconds"] == pytest.approx(0.008)
    assert json.dumps(content)


def test_traffic_against_the_ideal() -> None:
    pages = 528 * 147456  # the live K/V, context and block
    ideal = dflash_step(QWEN, QWEN_DRAFTER, 1, 512).hbm_bytes
    report = make_report(NAMES, SETUP)
    assert of_ideal(report, FUSED, facts(1)) == (10**10 + pages) / ideal
    assert of_ideal(report, FUSED, facts(1, silent_mosaic_calls=0)) == 10**10 / ideal
    assert of_ideal(report, DRAFT, facts(1)) == 10**10 / report.program(DRAFT).work.hbm_bytes
    assert of_ideal(report, "prefill", facts(1)) is None
    four = make_report(NAMES, replace(SETUP, tp=4))
    assert of_ideal(four, FUSED, facts(1)) == (10**10 + pages / 4) / (ideal / 4)


def test_predictions_without_a_compiled_plain_step_have_no_speed_up() -> None:
    report = make_report(NAMES, SETUP, [(FUSED, facts(14e6))])
    assert row("\n".join(lines(report)), "model estimate: cycles") == ["-", "8.000", "-", "1.600", "-"]


def test_small_models_are_counted_in_millions(capsys: pytest.CaptureFixture) -> None:
    assert main(["tpu-report", "--target", "default"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "0.135 B parameters" in text and "18.3 M parameters of its own" in text


def test_published_rows_stand_only_beside_what_was_measured(capsys: pytest.CaptureFixture) -> None:
    assert published.comparable(QWEN, QWEN_DRAFTER, chip_named("v5p"), 1, 1)
    assert not published.comparable(QWEN, QWEN_DRAFTER, chip_named("v5e"), 1, 1)
    assert not published.comparable(QWEN, QWEN_DRAFTER, chip_named("v5p"), 4, 1)
    assert main(["tpu-report", "--target", "llama-3.1-8b"]) == 0
    text = capsys.readouterr().out
    assert "Not what was asked here." in text and "mbpp 9.81 -> 3.48 ms" in text and "math500" not in text
    assert published.QWEN3_4B[0].step_ms == pytest.approx(12.32)


def test_published_figures_are_consistent_with_their_mean() -> None:
    for name in ("tau", "speed_up", "plain_tpot_ms", "dflash_tpot_ms"):
        values = [getattr(entry, name) for entry in published.QWEN3_4B]
        assert sum(values) / len(values) == pytest.approx(getattr(published.AVERAGE, name), abs=0.006)


def test_memory_of_a_row_by_hand() -> None:
    plan = plan_memory(replace(SETUP, rows=3, context=1020))
    slots = 3 * 1088 + 64  # 1020 and a block in 17 pages of 64, NULL on top
    assert plan.pages == slots * 36 * 2 * 8 * 128 * 2 and plan.draft_pages == slots * 5 * 2 * 8 * 128 * 2
    assert plan.features == 3 * 16 * 5 * 2560 * 2
    assert plan.target == 2 * 4022468096 and plan.drafter == 2 * 537427200
    assert plan.total == plan.target + plan.drafter + plan.pages + plan.draft_pages + plan.features
    full = replace(SETUP, context=1020, rows=3 + plan.more_rows)
    assert plan_memory(full).left >= 0
    with pytest.raises(InputError):
        plan_memory(replace(full, rows=full.rows + 1))


def test_chips_share_everything() -> None:
    one, four = plan_memory(SETUP), plan_memory(replace(SETUP, tp=4))
    assert four.total == pytest.approx(one.total / 4)


def test_the_last_block_is_cut_at_the_targets_limit() -> None:
    limit = QWEN.context_limit
    at_limit, before = plan_memory(replace(SETUP, context=limit)), plan_memory(replace(SETUP, context=limit - 15))
    assert at_limit.pages == before.pages


def test_a_context_that_does_not_fit_says_by_how_much(capsys: pytest.CaptureFixture) -> None:
    line = refusal(capsys, "--chip", "v5e", "--context", "40960", "--rows", "2")
    need, over = (float(n) for n in re.search(r"need ([\d.]+) GB .* ([\d.]+) GB more than the 16.00", line).groups())  # type: ignore[union-attr]
    slots = 2 * 40960 + 64
    expected = 2 * (4022468096 + 537427200) + slots * (147456 + 20480) + 2 * 409600
    assert need == pytest.approx(expected / 1e9, abs=0.005) and over == pytest.approx(expected / 1e9 - 16, abs=0.005)
    assert "context 40960 x 2 row(s)" in line and "lower context or rows" in line
    assert "take a smaller model" in refusal(capsys, "--chip", "v5e", "--target", "Qwen3-8B")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--chip", "v4"], ["chip is 'v4'", "v5p, v6e, v5e"]),
        (["--rows", "0"], ["rows is 0", "in 1.."]),
        (["--rows", "-3"], ["rows is -3"]),
        (["--rows", "1" + "0" * 400], ["rows is 1"]),
        (["--context", "0"], ["context is 0", "the target's limit"]),
        (["--context", "40961"], ["context is 40961", "in 1..40960", "the target's limit"]),
        (["--tp", "0"], ["tp is 0"]),
        (["--tp", "16"], ["tp is 16", "at most 8 chips of v5p"]),
        (["--tau", "0.5"], ["tau is 0.5", "in 1..16"]),
        (["--tau", "17"], ["tau is 17", "in 1..16"]),
        (["--tau", "nan"], ["tau is nan"]),
        (["--context", "many"], ["argument --context: invalid int value: 'many'", "tpu-report --help"]),
        (["--target", "nowhere"], ['target "nowhere"', "Qwen/Qwen3-4B", "default, bytes"]),
        (["--target", "Qwen3-4B", "--draft", "nowhere"], ['draft "nowhere"', "z-lab/Qwen3-4B-DFlash-b16"]),
        (["--target", "Qwen3-8B", "--draft", "z-lab/Qwen3-4B-DFlash-b16"], ["drafter hidden_size is 2560"]),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture) -> None:
    line = refusal(capsys, *arguments)
    for part in parts:
        assert part in line


def test_a_tp_that_does_not_divide_names_what(capsys: pytest.CaptureFixture) -> None:
    assert "tp is 3, which does not divide the target's vocab_size 151936: use " in refusal(capsys, "--tp", "3")
    smol = refusal(capsys, "--target", "default", "--tp", "2")
    assert "tp is 2, which does not divide the target's num_key_value_heads 3: use 1" in smol
    check_setup(replace(SETUP, tp=8))
    block = replace(QWEN_DRAFTER.block, num_kv_heads=1)
    with pytest.raises(InputError, match="does not divide the drafter's num_key_value_heads 1"):
        check_setup(replace(SETUP, tp=2, drafter=replace(QWEN_DRAFTER, block=block)))


def test_pages_are_the_engines() -> None:
    assert PAGE_SIZE == engine.PAGE_SIZE


def test_a_pair_in_folders(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_target(tmp_path / "target")
    write_drafter(tmp_path / "draft")
    config = str(tmp_path / "target" / "config.json")
    assert "--draft is missing" in refusal(capsys, "--target", config)
    arguments = ["tpu-report", "--target", config, "--draft", str(tmp_path / "draft"), "--context", "40", "--json"]
    assert main(arguments) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["target"]["config"]["block"]["hidden_size"] == TARGET["hidden_size"]
    assert content["tau"] == 4  # the default is more than this block
    plain = time_of(target_pass(read_target_config(tmp_path / "target"), 1, 1, 40), chip_named("v5p"))
    assert content["roofline"][0]["seconds"] == plain.seconds
