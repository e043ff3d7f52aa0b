"""The figures as pictures."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

from torch_dflash.errors import InputError

if TYPE_CHECKING:  # the figures need numpy, and the check below must not wait for it
    from torch_dflash.bench.figures import Figures


def check_plots() -> None:
    """Raises InputError without matplotlib: before hours of measuring, not behind them."""
    if find_spec("matplotlib") is None:
        raise InputError("the pictures of bench need matplotlib: pip install matplotlib")


def pictures(results: Sequence["Figures"]) -> dict[str, bytes]:
    """File name -> PNG, of what there is: no speed-up without plain decoding, nothing about drafts without any."""
    faster = [each for each in results if each.speed_up is not None]
    drafting = [each for each in results if each.acceptance]
    wanted: dict[str, tuple[Callable[..., None], Sequence[Figures]]] = {
        "speed-up.png": (_speed_ups, faster),
        "positional-decay.png": (_decays, drafting),
        "accept-histogram.png": (_histograms, drafting),
    }
    return {name: png(partial(draw, results=some)) for name, (draw, some) in wanted.items() if some}


def png(draw: Callable[..., None], panels: int = 1) -> bytes:
    """A picture of one panel or several side by side; draw(axes, ...) gets one axes for each."""
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    figure, content = Figure(figsize=(8 if panels == 1 else 5.5 * panels, 4), layout="constrained"), BytesIO()
    every = figure.subplots(1, panels, squeeze=False)[0]
    draw(*every)
    for axes in every:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(content, dpi=120)
    return content.getvalue()


def _speed_ups(axes: Any, results: Sequence["Figures"]) -> None:
    """Bars with their 95% intervals, a group for each set."""
    names, methods = _distinct(results, "dataset"), _distinct(results, "method")
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        some = [each for each in results if each.method == method]
        values = [each.speed_up for each in some if each.speed_up is not None]
        at = [names.index(each.dataset) + (number - (len(methods) - 1) / 2) * width for each in some]
        low = [0.0 if v.low is None else max(0.0, v.ratio - v.low) for v in values]
        high = [0.0 if v.high is None else max(0.0, v.high - v.ratio) for v in values]
        axes.bar(at, [v.ratio for v in values], width, yerr=[low, high], capsize=4, color=f"C{number}", label=method)
    axes.axhline(1, color="black", linewidth=1, label="plain decoding")
    axes.set_xticks(range(len(names)), names)
    axes.set(
        title="speed-up over plain decoding (TPOT), 95% bootstrap interval", ylabel="times as fast", ylim=(0, None)
    )


def _decays(axes: Any, results: Sequence["Figures"]) -> None:
    """A line for each set and method."""
    for style, each in _styled(results):
        positions = range(1, len(each.acceptance) + 1)
        axes.plot(positions, each.acceptance, style, label=f"{_label(each)}, tau {each.tau:.2f}")
    axes.set(title="drafts that are right, by position", xlabel="k", ylim=(0, 1))
    axes.set(ylabel="share of steps, first k all accepted")


def _histograms(axes: Any, results: Sequence["Figures"]) -> None:
    """Bars side by side, a colour for each set and method."""
    width = 0.8 / len(results)
    for number, each in enumerate(results):
        shares = [count / max(each.steps, 1) for count in each.accept_histogram]
        at = [a + (number - (len(results) - 1) / 2) * width for a in range(len(shares))]
        axes.bar(at, shares, width, color=f"C{number}", label=_label(each))
    axes.set_xticks(range(max(len(each.accept_histogram) for each in results)))
    axes.set(title="accepted drafts of a step", xlabel="accepted drafts", ylabel="share of steps")


def _styled(results: Sequence["Figures"]) -> list[tuple[str, "Figures"]]:
    """A colour for each set, a line style for each method."""
    names, methods = _distinct(results, "dataset"), _distinct(results, "method")
    styles = ("o-", "s--", "^:", "d-.")
    return [(f"C{names.index(e.dataset)}{styles[methods.index(e.method) % len(styles)]}", e) for e in results]


def _label(each: "Figures") -> str:
    return f"{each.dataset}, {each.method}"


def _distinct(results: Sequence["Figures"], name: str) -> list[str]:
    return list(dict.fromkeys(getattr(each, name) for each in results))
