"""The log of a run as a picture: loss and tau over the steps."""

import json
from pathlib import Path

from torch_dflash.errors import InputError


def plot_log(log: Path, picture: Path) -> None:
    """Write a PNG: the loss, tau on the training texts and, where it was measured, held-out tau of each prompt set."""
    try:
        from matplotlib.figure import Figure  # no pyplot: it would look for a display
    except ImportError:
        raise InputError("the picture of a run needs matplotlib: pip install matplotlib") from None
    every = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in every if "loss" in line]
    steps = [line["step"] for line in lines]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, [line["loss"] for line in lines], color="tab:blue", linewidth=1)
    left.set(title="training loss", xlabel="step", ylabel="weighted cross-entropy", ylim=(0, None))
    right.plot(steps, [line["tau"] for line in lines], color="tab:blue", linewidth=1, label="training texts")
    for number, (name, curve) in enumerate(held_out_curves(every).items(), 1):
        right.plot(*zip(*curve, strict=True), "o-", color=f"C{number}", label=f"{name}, held out: {curve[-1][1]:.2f}")
    right.set(title="tau: tokens kept per step", xlabel="step", ylim=(1, None))
    right.legend(loc="lower center", fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def held_out_curves(lines: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Prompt set -> (step, tau), out of the lines of a log."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, figures in line.get("held_out", {}).items():
            curves.setdefault(name, []).append((line["step"], figures["tau"]))
    return curves
