"""tau(K): the accept counts of one run cut off at K, the geometric model, and really decoding with K drafts."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from studies.geometric import (
    alpha_for,
    continued_tau,
    fitted_alpha,
    geometric_share,
    geometric_tau,
    slope_in_alpha,
    slope_in_k,
    tail_alpha,
    truncated_tau,
)
from studies.trace import Trace, accepted_shares, interval, read_trace, resampled
from torch_dflash.bench.divergence import first_difference
from torch_dflash.bench.records import Outcome
from torch_dflash.bench.report import ALL
from torch_dflash.bench.table import table
from torch_dflash.errors import InputError

NAME = "tau-of-k"
FAR = 16  # the K that published drafters come near to
DEFINITIONS = {
    "measured": "[K-1]: 1 + mean over the verify steps of min(accepted drafts, K), from a run with n drafts",
    "alpha": "accepted drafts / (accepted drafts + steps that rejected one), the maximum likelihood estimate of the "
    "model in which every draft is accepted with the same probability; alpha_interval: 95% bootstrap over prompts",
    "model": "[K-1]: (1 - alpha^(K+1)) / (1 - alpha)",
    "tail_alpha": "acceptance at the last 3 positions together; the measured decay is continued with it",
    "share": "tau(K) / tau(infinite K), by the model and with the measured decay continued",
    "worth": "gains of tau by the model at alpha and n: of 0.01 more alpha, of one more draft, of 16 drafts instead of "
    "n; the alpha that n drafts need for the same as 16; elasticity: per cent of tau for one per cent of alpha, of K",
    "decoded": "1 + accepted drafts / steps of a run that really decoded with K drafts; same_anchors: steps of the two "
    "runs at the same anchor behind the same text; agreeing: those with accepted drafts = min(accepted of n, K)",
}


@dataclass(frozen=True)
class Worth:
    """See DEFINITIONS. alpha_as_far is None where no alpha gives n drafts as much."""

    more_alpha: float
    one_more_draft: float
    far: float
    alpha_as_far: float | None
    elasticity_alpha: float
    elasticity_k: float


@dataclass(frozen=True)
class TauOfK:
    """Of one set; see DEFINITIONS. share_*: of n drafts and of FAR."""

    dataset: str
    prompts: int
    steps: int
    alpha: float
    alpha_interval: tuple[float, float]
    tail_alpha: float
    measured: tuple[float, ...]
    model: tuple[float, ...]
    far_model: float
    far_continued: float
    share_model: tuple[float, float]
    share_continued: tuple[float, float]
    worth: Worth


@dataclass(frozen=True)
class Check:
    """One set, truncated at K, beside really decoding with K drafts."""

    dataset: str
    num_drafts: int
    truncated: float
    decoded: float
    same_anchors: int
    agreeing: int


def taus(trace: Trace) -> list[TauOfK]:
    """Of every set, then of all together."""
    return [_tau_of_k(trace, name) for name in trace.outcomes]


def _tau_of_k(trace: Trace, name: str) -> TauOfK:
    histograms, n = trace.histograms(name), trace.num_drafts
    total = histograms.sum(axis=0).tolist()
    shares, alpha = accepted_shares(histograms.sum(axis=0)).tolist(), fitted_alpha(total)
    low, high = interval([fitted_alpha(drawn) for drawn in resampled(histograms).tolist()])
    limit = continued_tau(shares, math.inf)
    return TauOfK(
        dataset=name,
        prompts=len(histograms),
        steps=sum(total),
        alpha=alpha,
        alpha_interval=(float(low), float(high)),
        tail_alpha=tail_alpha(shares),
        measured=tuple(truncated_tau(total, k) for k in range(1, n + 1)),
        model=tuple(geometric_tau(alpha, k) for k in range(1, n + 1)),
        far_model=geometric_tau(alpha, FAR),
        far_continued=continued_tau(shares, FAR),
        share_model=(geometric_share(alpha, n), geometric_share(alpha, FAR)),
        share_continued=(continued_tau(shares, n) / limit, continued_tau(shares, FAR) / limit),
        worth=worth(alpha, n),
    )


def worth(alpha: float, num_drafts: int) -> Worth:
    """What raising alpha or K gains, by the model."""
    now, far = geometric_tau(alpha, num_drafts), geometric_tau(alpha, FAR)
    return Worth(
        more_alpha=0.01 * slope_in_alpha(alpha, num_drafts),
        one_more_draft=geometric_tau(alpha, num_drafts + 1) - now,
        far=far - now,
        alpha_as_far=alpha_for(far, num_drafts),
        elasticity_alpha=alpha / now * slope_in_alpha(alpha, num_drafts),
        elasticity_k=num_drafts / now * slope_in_k(alpha, num_drafts),
    )


def read_check(trace: Trace, path: Path) -> Trace:
    """A run with fewer drafts and nothing else changed. Raises InputError."""
    other = read_trace(path)
    names = {*trace.settings, *other.settings} - {"num_drafts", "method"}
    differ = sorted(name for name in names if trace.settings.get(name) != other.settings.get(name))
    if differ:
        raise InputError(
            f"--check {path}: {differ[0]} is not that of RUN {trace.path}; change nothing but --num-drafts"
        )
    if other.num_drafts >= trace.num_drafts:
        raise InputError(f"--check {path}: has {other.num_drafts} drafts; use a run with fewer than {trace.num_drafts}")
    if {name: len(some) for name, some in trace.outcomes.items()} != {n: len(s) for n, s in other.outcomes.items()}:
        raise InputError(f"--check {path}: has other prompts than RUN {trace.path}; finish both runs")
    return other


def checks(trace: Trace, others: Sequence[Trace]) -> list[Check]:
    """Of every set and run, then of all sets together."""
    return [_check(trace, other, name) for name in trace.outcomes for other in others]


def _check(trace: Trace, other: Trace, name: str) -> Check:
    k = other.num_drafts
    full, fewer = (each.histograms(name).sum(axis=0).tolist() for each in (trace, other))
    pairs = [pair for a, b in zip(trace.outcomes[name], other.outcomes[name], strict=True) for pair in shared(a, b)]
    agreeing = sum(min(of_full, k) == of_fewer for of_full, of_fewer in pairs)
    return Check(name, k, truncated_tau(full, k), truncated_tau(fewer, k), len(pairs), agreeing)


def shared(full: Outcome, fewer: Outcome) -> list[tuple[int, int]]:
    """Accept counts of both at the anchors that both have, as long as their texts are the same up to the anchor."""
    parted = first_difference(full.token_ids, fewer.token_ids)
    end = len(full.token_ids) if parted is None else parted
    some, others = anchors(full), anchors(fewer)
    return [(some[at], others[at]) for at in some if at in others and at < end]


def anchors(outcome: Outcome) -> dict[int, int]:
    """Index of the anchor among the new tokens -> drafts accepted behind it."""
    found, at = {}, 0
    for accepted in outcome.accepted:
        found[at] = accepted
        at += accepted + 1
    return found


def document(trace: Trace, results: Sequence[TauOfK], checked: Sequence[Check]) -> dict[str, Any]:
    """For a program."""
    about = {"run": str(trace.path), "run_settings": trace.settings, "definitions": DEFINITIONS}
    sets = [asdict(each) for each in results]
    return about | {"num_drafts": trace.num_drafts, "sets": sets, "checks": [asdict(each) for each in checked]}


def lines(results: Sequence[TauOfK], checked: Sequence[Check]) -> list[str]:
    """Tables: tau(K), limits, worth, checks."""
    n = len(results[0].measured)
    columns = ["set", "alpha (95%)", "", *(f"K = {k}" for k in range(1, n + 1)), f"K = {FAR}"]
    parts = [
        ["tau(K): measured (accept counts cut off at K), model, and the gap:", "", *table(columns, _tau_rows(results))],
        [f"Share of the limit (endless drafts), and tau({FAR}):", "", *_limit_table(results, n)],
        [f"What it is worth, by the model at alpha and K = {n}:", "", *_worth_table(results, n)],
    ]
    if checked:
        parts.append(["Cut off at K beside really decoding with K drafts:", "", *_check_table(checked)])
    return [line for part in parts for line in (*part, "")][:-1]


def _tau_rows(results: Sequence[TauOfK]) -> list[list[str]]:
    rows = []
    for r in results:
        low, high = r.alpha_interval
        gaps = [model / measured - 1 for model, measured in zip(r.model, r.measured, strict=True)]
        rows.append([r.dataset, f"{r.alpha:.3f} ({low:.3f}-{high:.3f})", "measured", *(f"{t:.2f}" for t in r.measured)])
        rows.append(["", "", "model", *(f"{t:.2f}" for t in (*r.model, r.far_model))])
        rows.append(["", "", "gap", *(f"{gap:+.1%}" for gap in gaps)])
    return rows


def _limit_table(results: Sequence[TauOfK], n: int) -> list[str]:
    head = ["set", f"model, K = {n}", f"model, K = {FAR}", "tail alpha", f"continued, K = {n}", f"continued, K = {FAR}"]
    rows = []
    for r in results:
        model, continued = ([f"{share:.1%}" for share in some] for some in (r.share_model, r.share_continued))
        rows.append([r.dataset, *model, f"{r.tail_alpha:.3f}", *continued, f"{r.far_model:.2f}, {r.far_continued:.2f}"])
    return table([*head, f"tau({FAR}): model, continued"], rows)


def _worth_table(results: Sequence[TauOfK], n: int) -> list[str]:
    head = ["set", "alpha + 0.01", f"K {n} -> {n + 1}", f"K {n} -> {FAR}", f"alpha as good as K = {FAR}"]
    rows = []
    for r in results:
        w = r.worth
        as_far = "-" if w.alpha_as_far is None else f"{w.alpha_as_far:.3f} ({w.alpha_as_far - r.alpha:+.3f})"
        gains = [f"{gain:+.3f}" for gain in (w.more_alpha, w.one_more_draft, w.far)]
        rows.append([r.dataset, *gains, as_far, f"{w.elasticity_alpha:.2f}, {w.elasticity_k:.2f}"])
    return table([*head, "elasticity: alpha, K"], rows)


def _check_table(checked: Sequence[Check]) -> list[str]:
    head = ["set", "K", "cut off", "decoded", "decoded / cut off", "same anchors", "accepted = min(a, K) there"]
    rows = []
    for c in checked:
        taus = [f"{c.truncated:.2f}", f"{c.decoded:.2f}", f"{c.decoded / c.truncated:.3f}"]
        rows.append([c.dataset, str(c.num_drafts), *taus, str(c.same_anchors), f"{c.agreeing} of {c.same_anchors}"])
    return table(head, rows)


def draw(left: Any, right: Any, results: Sequence[TauOfK], checked: Sequence[Check]) -> None:
    """tau(K), measured and by the model; and the gap between them."""
    for number, r in enumerate(results):
        colour, ks = "black" if r.dataset == ALL else f"C{number}", range(1, len(r.measured) + 1)
        left.plot(ks, r.measured, "o-", ms=4, color=colour, label=f"{r.dataset}, alpha {r.alpha:.2f}")
        left.plot(range(1, FAR + 1), [geometric_tau(r.alpha, k) for k in range(1, FAR + 1)], ":", color=colour)
        gaps = [100 * (model / measured - 1) for model, measured in zip(r.model, r.measured, strict=True)]
        right.plot(ks, gaps, "o-", ms=4, color=colour, label=r.dataset)
    for number, c in enumerate(each for each in checked if each.dataset == results[-1].dataset):
        label = f"{c.dataset}, really decoded" if number == 0 else None
        left.plot([c.num_drafts], [c.decoded], "x", ms=9, color="red", label=label)
    left.set(title="tau(K): measured, cut off at K; dotted: model", xlabel="K, drafts", ylabel="tau")
    left.set(ylim=(1, 1.4 * max(max(r.far_model, *r.measured) for r in results)))
    right.set(title="model against measured", xlabel="K, drafts", ylabel="per cent of tau")
    right.axhline(0, color="gray", linewidth=1)
