"""The command `torch-dflash`: one subcommand a file, bad input in one line with exit code 2."""

import argparse
import logging
import os
import sys
from typing import NoReturn

from torch_dflash import batch_command, generate_command
from torch_dflash.bench import command as bench_command
from torch_dflash.doctor import command as doctor_command
from torch_dflash.errors import InputError
from torch_dflash.tpu import command as tpu_command
from torch_dflash.vllm import command as vllm_command

BAD_INPUT = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


class _Progress(logging.Handler):
    """Shows on stderr what takes long. On a terminal the line of a running action is replaced when it ends."""

    def emit(self, record: logging.LogRecord) -> None:
        terminal = sys.stderr.isatty()
        if record.levelno == logging.DEBUG and not terminal:
            return
        start, end = ("\r\x1b[K", "") if terminal else ("", "\n")
        text = record.getMessage()
        if record.levelno > logging.DEBUG:
            end = "\n"
        sys.stderr.write(f"{start}{text}{end}")
        sys.stderr.flush()


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torch-dflash",
        description="Speculative decoding by block diffusion (DFlash): a small drafter proposes a block of tokens in "
        "one pass, the target verifies it in one pass, and the text is exactly the target's own.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    generate_command.add_arguments(
        commands.add_parser(
            "generate",
            help="write text",
            description="Write text with a target and its drafter. The text goes to stdout as it is accepted, "
            "everything else to stderr.",
        )
    )
    batch_command.add_arguments(
        commands.add_parser(
            "batch",
            help="answer a file of prompts",
            description="Answer a file of prompts, many at a time. As soon as one is answered, the next takes its "
            "place.",
        )
    )
    bench_command.add_arguments(
        commands.add_parser(
            "bench",
            help="measure methods beside plain decoding",
            description="Answer the same prompts by several methods, which take turns step by step on one code path, "
            "and report tau, accepted drafts, times, speed-ups over plain decoding with intervals, and whether outputs "
            "are equal. May be interrupted: the same command goes on. Exit code 1: outputs differ in float32.",
        )
    )
    doctor_command.add_arguments(
        commands.add_parser(
            "doctor",
            help="check a drafter's configuration",
            description="Read a target and its drafter, print what was understood, check the weights, and measure in "
            "one short run whether a plausible mistake (taps off by one, another RoPE base, a causal block ...) does "
            "better than the configuration. Exit code 0: healthy; 1: suspicious or broken; 2: bad input.",
        )
    )
    tpu_command.add_arguments(
        commands.add_parser(
            "tpu-report",
            help="estimate a pair on TPU chips, without one",
            description="Say what a target and its drafter need and can reach on TPU chips that are not at hand: a "
            "memory plan, rooflines, the time per token predicted from them beside published figures, and what a "
            "verification costs against its number of tokens. Only shapes are read. All are model estimates.",
        )
    )
    vllm_command.add_arguments(
        commands.add_parser(
            "vllm-check",
            help="check this environment's vLLM",
            description="Print what the vLLM plugin finds in this environment (vllm-tpu and tpu-inference), and which "
            "names it replaces when a server starts with method dflash and MODEL_IMPL_TYPE=vllm.",
        )
    )
    training = commands.add_parser(
        "train",
        help="train a drafter",
        description="Train a drafter for a target, DFlash's or an EAGLE-3 head: the target answers prompts, and the "
        "drafter learns to foresee its answers.",
    )
    if argv[:1] == ["train"]:  # only then is it worth the seconds that its imports take
        _add_training_arguments(training)
    return parser


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    try:
        from torch_dflash.train import command
    except ModuleNotFoundError as error:
        raise InputError(f"training needs {error.name}: pip install 'torch-dflash[train]'") from None
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code is 0, 2 for bad input, 130 when interrupted."""
    logger = logging.getLogger("torch_dflash")
    handler = _Progress()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        argv = sys.argv[1:] if argv is None else argv
        arguments = _parser(argv).parse_args(argv)
        return arguments.run(arguments)
    except (InputError, ImportError) as error:  # ImportError: versions that do not fit, a missing package
        print(f"torch-dflash: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\ntorch-dflash: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Nothing more can be written; keep Python from trying at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        logger.removeHandler(handler)


def entry() -> NoReturn:
    """The console script. It leaves without tearing the interpreter down: an XLA thread that lets go of a weight at
    that moment would need the interpreter, and abort the process behind a finished answer."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
