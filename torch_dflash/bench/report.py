"""The report of a finished run: one JSON document, a Markdown text, pictures."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch_dflash.bench.figures import DEFINITIONS, Figures, figures
from torch_dflash.bench.folder import RunFolder, batches_of
from torch_dflash.bench.plot import pictures
from torch_dflash.bench.records import Batch
from torch_dflash.bench.table import markdown

ALL = "all sets"


def report(
    folder: RunFolder, datasets: Sequence[str], methods: Sequence[str], seed: int
) -> tuple[list[Figures], dict[str, Any], str]:
    """Of a folder that holds all batches: the figures, the JSON document and the Markdown text; all files written."""
    batches = folder.batches()
    results = figures_of(batches, datasets, methods, seed)
    about = document(folder, results, batches)
    return results, about, write_report(folder, about, results)


def figures_of(batches: Sequence[Batch], datasets: Sequence[str], methods: Sequence[str], seed: int) -> list[Figures]:
    """Of each set by each method; then, of several sets, of all prompts together."""
    groups = {name: batches_of(batches, name) for name in datasets}
    if len(groups) > 1:
        groups[ALL] = list(batches)
    return [figures(name, method, some, seed) for name, some in groups.items() for method in methods]


def document(folder: RunFolder, results: Sequence[Figures], batches: Sequence[Batch]) -> dict[str, Any]:
    """Everything that the Markdown text has, in full precision."""
    methods = dict.fromkeys(each.method for each in results)
    return {
        **folder.about,
        "command": shlex.join(["torch-dflash", *sys.argv[1:]]),
        "argv": sys.argv,
        "warm_up_seconds": {name: sum(batch.warm_up[name] for batch in batches) for name in methods},
        "definitions": DEFINITIONS,
        "results": [asdict(each) for each in results],
    }


def write_report(folder: RunFolder, about: dict[str, Any], results: Sequence[Figures]) -> str:
    """Write report.json, report.md and the pictures. Returns the Markdown text."""
    text = markdown(about, results)
    for name, content in pictures([each for each in results if each.dataset != ALL]).items():
        folder.write(name, content)
    folder.write("report.md", text.encode())
    folder.write("report.json", json.dumps(about, indent=1).encode())
    return text
