"""What every study leaves in its folder: NAME.md, NAME.png and NAME.json."""

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch_dflash.bench.environment import environment
from torch_dflash.bench.figures import Spread
from torch_dflash.bench.folder import RunFolder, open_folder
from torch_dflash.bench.plot import check_plots, png


def open_out(arguments: Namespace) -> RunFolder:
    """The folder of --out, before anything is measured. Raises InputError."""
    check_plots()
    asked = {name: value for name, value in vars(arguments).items() if not callable(value)}
    settings = json.loads(json.dumps(asked, default=str))
    return open_folder(arguments.out, settings, environment())


def write(
    folder: RunFolder, name: str, result: dict[str, Any], lines: Sequence[str], draw: Callable[..., None], panels: int
) -> None:
    """All three files, and the table on stdout. `draw` gets the axes of `panels` panels."""
    document = {**folder.about, "argv": sys.argv, "result": result}
    text = "\n".join(lines) + "\n"
    folder.write(f"{name}.json", json.dumps(document, indent=1).encode())
    folder.write(f"{name}.png", png(draw, panels))
    folder.write(f"{name}.md", text.encode())
    print(text, end="")


def spread(values: Iterable[float]) -> Spread:
    """Median, lowest and highest."""
    listed = list(values)
    return Spread(statistics.median(listed), min(listed), max(listed))


def shown(value: Spread, digits: int = 2, times: float = 1.0) -> str:
    """A cell: median (lowest-highest)."""
    median, low, high = (f"{number * times:.{digits}f}" for number in (value.median, value.low, value.high))
    return f"{median} ({low}-{high})"
