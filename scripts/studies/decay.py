"""Positional decay by task: how far into the block drafts are right."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from studies.trace import Trace, accepted_shares, interval, resampled
from torch_dflash.bench.report import ALL
from torch_dflash.bench.table import table

NAME = "decay"
DEFINITIONS = {
    "share": "[k-1]: share of the verify steps whose first k drafts were all accepted, all prompts of a set together",
    "low, high": "95% bootstrap interval of that over prompts",
    "conditional": "[k-1]: share of the steps with k - 1 accepted drafts that accepted the next one too; null where no "
    "step came so far",
    "tau": "1 + accepted drafts / steps; a last step counts with all drafts that the target agreed with",
}


@dataclass(frozen=True)
class Decay:
    """Of one set; see DEFINITIONS."""

    dataset: str
    prompts: int
    steps: int
    tau: float
    share: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    conditional: tuple[float | None, ...]


def decays(trace: Trace) -> list[Decay]:
    """Of every set, then of all together."""
    return [_decay(name, trace.histograms(name)) for name in trace.outcomes]


def _decay(name: str, histograms: np.ndarray) -> Decay:
    total = histograms.sum(axis=0)
    share = accepted_shares(total)
    low, high = (tuple(bound.tolist()) for bound in interval(accepted_shares(resampled(histograms))))
    return Decay(
        dataset=name,
        prompts=len(histograms),
        steps=int(total.sum()),
        tau=float(1 + share.sum()),
        share=tuple(share.tolist()),
        low=low,
        high=high,
        conditional=conditional(share),
    )


def conditional(share: np.ndarray) -> tuple[float | None, ...]:
    """Acceptance of the k-th draft where the k - 1 before it were accepted."""
    before = [1.0, *share[:-1].tolist()]
    return tuple(now / past if past else None for past, now in zip(before, share.tolist(), strict=True))


def lines(results: list[Decay]) -> list[str]:
    """Two tables: shares with their intervals, and conditional acceptance."""
    columns = [f"k = {k}" for k in range(1, len(results[0].share) + 1)]
    shares = ([r.dataset, str(r.prompts), str(r.steps), f"{r.tau:.2f}", *_cells(r)] for r in results)
    after = ([r.dataset, *("-" if c is None else f"{c:.2f}" for c in r.conditional)] for r in results)
    return [
        "Share of the steps whose first k drafts were all accepted, with its 95% bootstrap interval over prompts:",
        "",
        *table(["set", "prompts", "steps", "tau", *columns], shares),
        "",
        "Acceptance of the k-th draft where those before it were accepted:",
        "",
        *table(["set", *columns], after),
    ]


def _cells(result: Decay) -> list[str]:
    bounds = zip(result.share, result.low, result.high, strict=True)
    return [f"{share:.2f} ({low:.2f}-{high:.2f})" for share, low, high in bounds]


def draw(left: Any, right: Any, results: list[Decay]) -> None:
    """Shares with their intervals, and conditional acceptance; a colour for each set, all together in black."""
    for number, each in enumerate(results):
        colour = "black" if each.dataset == ALL else f"C{number}"
        at = np.arange(1, len(each.share) + 1) + 0.05 * (number - 2)
        bars = np.maximum([np.subtract(each.share, each.low), np.subtract(each.high, each.share)], 0)
        left.errorbar(
            at, each.share, bars, fmt="o-", ms=4, capsize=2, color=colour, label=f"{each.dataset}, tau {each.tau:.2f}"
        )
        known = [(k, c) for k, c in enumerate(each.conditional, 1) if c is not None]
        right.plot(*zip(*known, strict=True), "o-", ms=4, color=colour, label=each.dataset)
    left.set(title="first k drafts all accepted, 95% interval", xlabel="k", ylabel="share of steps", ylim=(0, 1))
    right.set(title="k-th draft, those before it accepted", xlabel="k", ylabel="acceptance", ylim=(0, 1.02))


def document(trace: Trace, results: list[Decay]) -> dict[str, Any]:
    """For a program."""
    about = {"run": str(trace.path), "run_settings": trace.settings, "definitions": DEFINITIONS}
    return about | {"sets": [asdict(each) for each in results]}
