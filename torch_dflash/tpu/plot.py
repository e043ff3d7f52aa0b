"""The K-flat table as a picture: what a verification costs against its query tokens."""

from pathlib import Path

from torch_dflash.errors import InputError
from torch_dflash.tpu.report import Report


def plot_k_flat(report: Report, picture: Path) -> None:
    """Write a PNG: the roofline of every chip with its knee, and for the chip asked for what memory and multipliers
    need. Raises InputError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # no pyplot: it would look for a display
    except ImportError:
        raise InputError("the picture of K-flat needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, curve in enumerate(report.curves):
        name = f"{curve.chip}: knee {curve.knee or 'nowhere'}"
        axes.plot(*_line([(p.tokens, p.time.seconds) for p in curve.points]), "o-", color=f"C{number}", label=name)
    own = report.curves[0]
    axes.plot(*_line([(p.tokens, p.time.memory) for p in own.points]), "--", color="gray", label=f"{own.chip} memory")
    axes.plot(*_line([(p.tokens, p.time.compute) for p in own.points]), ":", color="gray", label=f"{own.chip} compute")
    setup = report.setup
    where = f"{report.names[0]} on {setup.tp} chip(s), {setup.rows} row(s), context {setup.context}"
    axes.set(title=f"{where}\nmodel estimate, not measured", xlabel="query tokens of a row", ylabel="ms")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = [point.tokens for point in own.points]
    axes.set_xticks(tokens, [str(number) for number in tokens])
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def _line(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """(tokens, seconds) -> tokens and milliseconds."""
    return [tokens for tokens, _ in points], [seconds * 1e3 for _, seconds in points]
