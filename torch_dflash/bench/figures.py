"""What the batches of a set come to. The definitions are in DEFINITIONS, and reports repeat them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

import numpy as np

from torch_dflash.bench.methods import PLAIN
from torch_dflash.bench.records import Batch, Outcome

RESAMPLES = 2000
DEFINITIONS = {
    "clock": "seconds of a method are those of its own engine's steps; the methods take turns, and others' steps are "
    "not counted. Compilation and warm-up come before, and are counted apart",
    "prompts": "the first turn of each line of a set; of several turns the others are not used",
    "tau": "tokens kept per verify step: (new tokens - 1) / steps, of all prompts together",
    "accept_histogram": "[a]: steps in which exactly a drafts were accepted. A last step that the budget or a stop cut "
    "short counts with all drafts that the target agreed with, as in the statistics of `generate`",
    "acceptance": "[k-1]: share of the steps whose first k drafts were all accepted",
    "ttft": "from the start of a batch to a prompt's first token on the host, median of the prompts (lowest, highest)",
    "tpot": "seconds from first to last token / tokens behind the first, of all prompts together; in brackets the "
    "lowest and highest of the prompts' own",
    "tokens_per_second": "new tokens / seconds, prefill included, of all prompts together",
    "speed_up": "plain decoding's tpot / this method's, with a 95% bootstrap interval over batches (prompts, where one "
    f"row is used), {RESAMPLES} resamples; none for a single batch",
    "equal": "prompts all of whose tokens equal plain decoding's",
    "divergence": "of the others: index of the first other new token, and there logit of plain decoding's token - "
    "logit of the other one, by the target's prefill in the run's dtype, before temperature. "
    "The table has the median index, and the largest gap without its sign",
}


@dataclass(frozen=True)
class Spread:
    """Of several values."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class SpeedUp:
    """Over plain decoding. low, high: the interval; None for a single batch."""

    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Equality:
    """With plain decoding. positions and gaps: of the answers that differ, in the order of the prompts."""

    equal: int
    prompts: int
    positions: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True)
class Figures:
    """One set by one method; see DEFINITIONS. Seconds. tau is 0 without steps; tpot is None where no answer has a
    second token; speed_up and equality are None for plain decoding and without it."""

    dataset: str
    method: str
    prompts: int
    new_tokens: int
    steps: int
    tau: float
    accept_histogram: tuple[int, ...]
    acceptance: tuple[float, ...]
    ttft: Spread
    tpot: float | None
    tpot_of_prompts: Spread | None
    tokens_per_second: float
    speed_up: SpeedUp | None
    equality: Equality | None
    warm_up: float


def figures(dataset: str, method: str, batches: Sequence[Batch], seed: int) -> Figures:
    """Of at least one batch. `seed` is the bootstrap's."""
    outcomes = outcomes_of(batches, method)
    histogram = _histogram(outcomes, max(batch.num_drafts[method] for batch in batches))
    steps, tokens = sum(histogram), sum(len(o.token_ids) for o in outcomes)
    kept, decoding = sum(map(kept_tokens, outcomes)), sum(o.decode_seconds for o in outcomes)
    own_tpots = [o.decode_seconds / kept_tokens(o) for o in outcomes if kept_tokens(o)]
    comparable = method != PLAIN and all(batch.has_plain for batch in batches)
    return Figures(
        dataset=dataset,
        method=method,
        prompts=len(outcomes),
        new_tokens=tokens,
        steps=steps,
        tau=kept / steps if steps else 0.0,
        accept_histogram=histogram,
        acceptance=tuple(sum(histogram[k:]) / steps if steps else 0.0 for k in range(1, len(histogram))),
        ttft=_spread([o.ttft for o in outcomes]),
        tpot=decoding / kept if kept else None,
        tpot_of_prompts=_spread(own_tpots) if own_tpots else None,
        tokens_per_second=tokens / sum(batch.seconds[method] for batch in batches),
        speed_up=speed_up(batches, method, seed) if comparable else None,
        equality=equality(outcomes) if comparable else None,
        warm_up=sum(batch.warm_up[method] for batch in batches),
    )


def outcomes_of(batches: Sequence[Batch], method: str) -> list[Outcome]:
    """All prompts' outcomes."""
    return list(chain(*(batch.outcomes[method] for batch in batches)))


def kept_tokens(outcome: Outcome) -> int:
    """Tokens that verify steps gave: all but prefill's."""
    return len(outcome.token_ids) - 1


def speed_up(batches: Sequence[Batch], method: str, seed: int) -> SpeedUp | None:
    """The ratio of TPOTs and its bootstrap interval; None where one of the two has no second token."""
    own, plain = _decoding(batches, method), _decoding(batches, PLAIN)
    if not own[1].sum() or not plain[1].sum():
        return None
    every = np.arange(len(batches))[None]
    ratio = float(_ratios(plain, own, every)[0])
    if len(batches) < 2:
        return SpeedUp(ratio, None, None)
    drawn = np.random.default_rng(seed).integers(len(batches), size=(RESAMPLES, len(batches)))
    ratios = _ratios(plain, own, drawn)
    low, high = np.percentile(ratios[np.isfinite(ratios)], [2.5, 97.5])
    return SpeedUp(ratio, float(low), float(high))


def _decoding(batches: Sequence[Batch], method: str) -> tuple[np.ndarray, np.ndarray]:
    """Of each batch: decode seconds, and the tokens they gave."""
    outcomes = [batch.outcomes[method] for batch in batches]
    seconds = [sum(o.decode_seconds for o in some) for some in outcomes]
    return np.array(seconds), np.array([sum(map(kept_tokens, some)) for some in outcomes], float)


def _ratios(plain: tuple[np.ndarray, np.ndarray], own: tuple[np.ndarray, np.ndarray], drawn: np.ndarray) -> np.ndarray:
    """One ratio for each row of `drawn` [n, batches]; NaN where a draw holds no second token."""
    with np.errstate(divide="ignore", invalid="ignore"):
        tpots = [seconds[drawn].sum(axis=1) / tokens[drawn].sum(axis=1) for seconds, tokens in (plain, own)]
        return tpots[0] / tpots[1]


def equality(outcomes: Sequence[Outcome]) -> Equality:
    """Of outcomes that were compared with plain decoding's."""
    found = [o.divergence for o in outcomes if o.divergence is not None]
    positions, gaps = tuple(d.position for d in found), tuple(d.gap for d in found)
    return Equality(len(outcomes) - len(found), len(outcomes), positions, gaps)


def _histogram(outcomes: Sequence[Outcome], num_drafts: int) -> tuple[int, ...]:
    accepted = np.array([a for o in outcomes for a in o.accepted], int)
    return tuple(np.bincount(accepted, minlength=num_drafts + 1).tolist())


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))
