"""`torch-dflash tpu-report`: what a pair would need and reach on TPU chips that are not at hand."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dflash.config_reader import check_pair, read_drafter_config, read_target_config
from torch_dflash.errors import InputError
from torch_dflash.tpu.chips import chip_named
from torch_dflash.tpu.published import AVERAGE
from torch_dflash.tpu.shapes import drafter_folder, drafter_of, target_folder

# jax takes seconds to import: the plan and the report, which lead to it, are imported where they are used.
if TYPE_CHECKING:
    from torch_dflash.tpu.plan import Setup
    from torch_dflash.tpu.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    config = "folder, config.json, or a built-in name"
    add("--chip", default="v5p", metavar="CHIP", help="v5p (default), v6e or v5e")
    add("--target", default="Qwen/Qwen3-4B", metavar="CONFIG", help=f"{config} (default Qwen/Qwen3-4B)")
    add("--draft", metavar="CONFIG", help=f"its drafter: {config}; left out for a built-in target: the one made for it")
    add("--tp", type=int, default=1, metavar="N", help="chips over which the models are sharded (default 1)")
    add("--rows", type=int, default=1, metavar="R", help="requests at a time (default 1)")
    add("--context", type=int, default=512, metavar="N", help="positions of each row before the step (default 512)")
    add("--tau", type=float, metavar="T", help=f"tokens kept from a step (default {AVERAGE.tau}, a published average)")
    add("--no-compile", action="store_true", help="rooflines only, even where libtpu is installed")
    add("--json", action="store_true", help="print one JSON document instead of the report")
    add("--out", type=Path, metavar="FOLDER", help="also write report.txt, report.json and k-flat.png there")


def run(arguments: argparse.Namespace) -> int:
    """Report. Returns 0. Raises InputError."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs here, and a chip that is not there is not looked for
    from torch_dflash.tpu.compile import compile_setup, why_not
    from torch_dflash.tpu.plan import plan_memory
    from torch_dflash.tpu.report import document, make_report
    from torch_dflash.tpu.report_lines import lines

    names, setup = read_setup(arguments)
    plan_memory(setup)  # refuses what does not fit, before anything is compiled
    reason = "--no-compile" if arguments.no_compile else why_not()
    report = make_report(names, setup, () if reason else compile_setup(setup), reason or "")
    content, text = json.dumps(document(report)), "\n".join(lines(report))
    if arguments.out is not None:
        _write(arguments.out, report, text, content)
    print(content if arguments.json else text)
    return 0


def read_setup(arguments: argparse.Namespace) -> tuple[tuple[str, str], "Setup"]:
    """The names of target and drafter, and what is asked for, checked. Raises InputError."""
    from torch_dflash.tpu.plan import Setup, check_setup

    chip = chip_named(arguments.chip)
    target = read_target_config(target_folder(arguments.target))
    names = arguments.target, _draft_name(arguments)
    drafter = read_drafter_config(drafter_folder(names[1]))
    check_pair(target.shape, drafter)
    tau = min(AVERAGE.tau, drafter.block_size) if arguments.tau is None else arguments.tau
    setup = Setup(chip, target, drafter, arguments.tp, arguments.rows, arguments.context, tau)
    check_setup(setup)
    return names, setup


def _draft_name(arguments: argparse.Namespace) -> str:
    name = arguments.draft or drafter_of(arguments.target)
    if name is None:
        raise InputError(f'--draft is missing: name the drafter of "{arguments.target}"')
    return name


def _write(folder: Path, report: "Report", text: str, content: str) -> None:
    from torch_dflash.tpu.plot import plot_k_flat

    try:
        folder.mkdir(parents=True, exist_ok=True)
        plot_k_flat(report, folder / "k-flat.png")
        (folder / "report.txt").write_text(f"{text}\n", encoding="utf-8")
        (folder / "report.json").write_text(f"{content}\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be written ({error.strerror}); name another folder") from None
