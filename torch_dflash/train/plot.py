"""The log of a run as a picture: loss and tau over the steps."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch_dflash.errors import InputError


def plot_log(log: Path, picture: Path, held_out: Mapping[str, float] | None = None) -> None:
    """Write a PNG. held_out: name of a prompt set -> its tau, drawn at the last step."""
    try:
        from matplotlib.figure import Figure  # no pyplot: it would look for a display
    except ImportError:
        raise InputError("the picture of a run needs matplotlib: pip install matplotlib") from None
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, [line["loss"] for line in lines], color="tab:blue", linewidth=1)
    left.set(title="training loss", xlabel="step", ylabel="weighted cross-entropy", ylim=(0, None))
    right.plot(steps, [line["tau"] for line in lines], color="tab:blue", linewidth=1, label="training texts")
    for index, (name, tau) in enumerate(sorted((held_out or {}).items(), key=lambda item: -item[1])):
        right.plot(steps[-1], tau, "o", color=f"C{index + 1}", label=f"{name}, held out: {tau:.2f}")
    right.set(title="tau: tokens kept per step", xlabel="step", ylim=(1, None))
    right.legend(loc="lower center", fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
