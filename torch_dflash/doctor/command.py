"""`torch-dflash doctor`: is this drafter's configuration the one that it was trained with?"""

import argparse
import json
from pathlib import Path

# torch and transformers take seconds to import: they are imported where they are used, so that `--help` and bad
# arguments need not wait for them.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("target", metavar="TARGET", help="folder, Hugging Face hub id, default (SmolLM2-135M-Instruct) or bytes")
    add("draft", metavar="DRAFT", help="its drafter: folder, hub id, default or bytes")
    add("--prompts", type=Path, metavar="FILE", help='JSON lines, {"turns": [text, ...]}; the first 8 are answered')
    add("--max-new-tokens", type=int, default=96, metavar="N", help="length of the answers (default 96)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    add("--json", action="store_true", help="print one JSON document instead of the report")


def run(arguments: argparse.Namespace) -> int:
    """Examine and report. Returns 0 for a healthy pair, 1 for a suspicious or broken one. Raises InputError."""
    from torch_dflash.doctor.examine import examine
    from torch_dflash.doctor.report import document, lines
    from torch_dflash.train.records import read_prompts

    prompts = None if arguments.prompts is None else read_prompts(arguments.prompts)
    report = examine(arguments.target, arguments.draft, arguments.dtype, prompts, arguments.max_new_tokens)
    print(json.dumps(document(report)) if arguments.json else "\n".join(lines(report)))
    return int(report.verdict.kind != "healthy")
