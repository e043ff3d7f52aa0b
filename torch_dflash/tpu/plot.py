"""The K-flat table as a picture: what a verification costs against its query tokens."""

from pathlib import Path

from torch_dflash.errors import InputError
from torch_dflash.tpu.report import Report


def plot_k_flat(report: Report, picture: Path) -> None:
    """Write a PNG: milliseconds that the memory and the multipliers need, the roofline, and the knee. Raises InputError
    without matplotlib."""
    try:
        from matplotlib.figure import Figure  # no pyplot: it would look for a display
    except ImportError:
        raise InputError("the picture of K-flat needs matplotlib: pip install matplotlib") from None
    tokens = [point.tokens for point in report.points]
    setup = report.setup
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(tokens, [p.time.memory * 1e3 for p in report.points], "--", color="tab:blue", label="memory")
    axes.plot(tokens, [p.time.compute * 1e3 for p in report.points], "--", color="tab:orange", label="compute")
    axes.plot(tokens, [p.time.seconds * 1e3 for p in report.points], "o-", color="black", label="roofline")
    if report.knee is not None:
        axes.axvline(report.knee, color="gray", linewidth=1, label=f"knee: {report.knee}")
    where = f"{report.names[0]} on {setup.tp} {setup.chip.name}, {setup.rows} row(s), context {setup.context}"
    axes.set(title=f"{where}\nmodel estimate, not measured", xlabel="query tokens of a row", ylabel="ms")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
