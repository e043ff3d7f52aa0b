"""What bench computes: figures and intervals against slow twins, turns, divergences against the oracle."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import Loaded, prompt_of

from torch_dflash.bench.divergence import compared, first_difference, judge
from torch_dflash.bench.figures import RESAMPLES, Figures, SpeedUp, Spread, figures
from torch_dflash.bench.plot import pictures
from torch_dflash.bench.race import Lap, race
from torch_dflash.bench.records import Batch, Divergence, Outcome
from torch_dflash.bench.report import ALL, figures_of
from torch_dflash.bench.table import main_table, markdown, not_lossless
from torch_dflash.engine import Engine
from torch_dflash.pair import Pair
from torch_dflash.reference import greedy, target_pass
from torch_dflash.requests import Request
from torch_dflash.service import engine_for, make_pace

PLANTED = 0.1  # of the head, whose weights are 0.35 apart


def outcome(tokens: int, accepted: list[int], ttft: float, seconds: float, **others: Any) -> Outcome:
    return Outcome(list(range(tokens)), accepted, "length", 5, ttft, seconds, **others)


def batch(dataset: str, first: int, plain: Outcome, dflash: Outcome) -> Batch:
    seconds = {"plain": plain.ttft + plain.decode_seconds, "dflash": dflash.ttft + dflash.decode_seconds}
    own = {"plain": [plain], "dflash": [dflash]}
    return Batch(dataset, first, {"plain": 0, "dflash": 3}, {"plain": 1.0, "dflash": 2.0}, seconds, own)


BATCHES = [
    batch("a", 0, outcome(9, [0] * 8, 0.5, 8.0), outcome(9, [3, 0, 2], 0.6, 3.0)),
    batch("a", 1, outcome(5, [0] * 4, 0.7, 5.0), outcome(5, [3], 0.4, 1.0, divergence=Divergence(2, 0.125))),
    batch("a", 2, outcome(1, [], 0.1, 0.0), outcome(1, [], 0.2, 0.0)),
    batch("b", 0, outcome(3, [0] * 2, 0.3, 2.0), outcome(3, [0, 0], 0.3, 4.0)),
]


def test_figures_by_hand() -> None:
    own = figures("a", "dflash", BATCHES[:3], seed=0)
    assert own == Figures(
        dataset="a",
        method="dflash",
        prompts=3,
        new_tokens=15,
        steps=4,
        tau=3.0,
        accept_histogram=(1, 0, 1, 2),
        acceptance=(0.75, 0.75, 0.5),
        ttft=Spread(0.4, 0.2, 0.6),
        tpot=4 / 12,
        tpot_of_prompts=Spread((3 / 8 + 1 / 4) / 2, 1 / 4, 3 / 8),
        tokens_per_second=pytest.approx(15 / 5.2),
        speed_up=SpeedUp(pytest.approx((13 / 12) / (4 / 12)), own.speed_up.low, own.speed_up.high),
        equality=own.equality,
        warm_up=6.0,
    )
    assert (own.equality.equal, own.equality.prompts) == (2, 3)
    assert (own.equality.positions, own.equality.gaps) == ((2,), (0.125,))
    plain = figures("a", "plain", BATCHES[:3], seed=0)
    assert (plain.tau, plain.acceptance, plain.speed_up, plain.equality) == (1.0, (), None, None)


def test_the_interval_resamples_batches() -> None:
    """Against a loop over resamples; draws without any second token are left out."""
    seconds, tokens = {"plain": [8.0, 5.0, 0.0], "dflash": [3.0, 1.0, 0.0]}, [8, 4, 0]
    ratios = []
    for drawn in np.random.default_rng(7).integers(3, size=(RESAMPLES, 3)):
        count = sum(tokens[i] for i in drawn)
        if count:
            tpot = {name: sum(values[i] for i in drawn) / count for name, values in seconds.items()}
            ratios.append(tpot["plain"] / tpot["dflash"])
    assert len(ratios) < RESAMPLES
    found = figures("a", "dflash", BATCHES[:3], seed=7).speed_up
    assert (found.low, found.high) == pytest.approx((np.percentile(ratios, 2.5), np.percentile(ratios, 97.5)))
    assert found == figures("a", "dflash", BATCHES[:3], seed=7).speed_up
    assert figures("b", "dflash", BATCHES[3:], seed=7).speed_up == SpeedUp(0.5, None, None)
    assert figures("a", "dflash", BATCHES[2:3], seed=7).speed_up is None


def test_all_sets_are_pooled_prompts() -> None:
    results = figures_of(BATCHES, ["a", "b"], ["plain", "dflash"], seed=0)
    assert [(r.dataset, r.method) for r in results[::2]] == [("a", "plain"), ("b", "plain"), (ALL, "plain")]
    assert results[-1].tau == 14 / 6 and results[-1].prompts == 4
    assert len(figures_of(BATCHES[:3], ["a"], ["dflash"], seed=0)) == 1


def test_unequal_float32_is_said_and_only_there() -> None:
    results = figures_of(BATCHES, ["a", "b"], ["plain", "dflash"], seed=0)
    about = {"settings": {"dtype": "float32"}, "environment": {"packages": {}, "machine": "m", "git": "g"}}
    about |= {"command": "c", "began": "now", "warm_up_seconds": {}}
    assert "**Not equal in float32**: a, dflash: 1 outputs." in markdown(about, results)
    assert "**Not equal in float32**: b" not in markdown(about, results)
    assert "Not equal" not in markdown(about | {"settings": {"dtype": "bfloat16"}}, results)
    assert not_lossless("float32", [results[3]]) == []
    assert "2/3 | 2 (at most 0.125) |" in main_table(results)[3]


def test_no_drafts_no_pictures_of_them() -> None:
    assert pictures(figures_of(BATCHES, ["a", "b"], ["plain"], seed=0)) == {}
    assert all(png.startswith(b"\x89PNG") for png in pictures(figures_of(BATCHES, ["a"], ["dflash"], 0)).values())


def requests_for(count: int, tokens: int) -> list[Request]:
    return [Request(i, tuple(prompt_of(5 + i)), tokens, ()) for i in range(count)]


def engine_of(pair: Pair, method: str, requests: list[Request], rows: int) -> Engine:
    return engine_for(pair, make_pace(pair, method, None), requests, rows, 2)


def test_engines_stay_together(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes on has never written more than another that is not finished; so no lead is longer than a dispatch."""
    requests = requests_for(3, 30)
    engines = {method: engine_of(tiny.pair, method, requests, 2) for method in ("plain", "dflash")}
    seen, step = [], Lap.step

    def watched(lap: Lap) -> None:
        before = lap.seconds
        step(lap)
        assert lap.seconds > before
        seen.append((id(lap), sum(lap.counts)))

    monkeypatch.setattr(Lap, "step", watched)
    laps = race(engines, requests)
    written = {id(lap): 0 for lap in laps.values()}
    total = 3 * 30
    for lap, count in seen:
        assert all(written[lap] <= other for other in written.values() if other < total)
        written[lap] = count
    assert set(written.values()) == {total}
    outcomes = laps["dflash"].outcomes()
    for request, found in zip(requests, outcomes, strict=True):
        assert found.token_ids == greedy(tiny.target, request.prompt_ids, 30)
        assert sum(a + 1 for a in found.accepted[:-1]) < len(found.token_ids) - 1 <= sum(a + 1 for a in found.accepted)


def test_a_planted_divergence_is_found_and_measured(tiny: Loaded) -> None:
    """A "dflash" that decodes with slightly other weights. Share, place and gap against the eager oracle."""
    requests = requests_for(8, 12)
    head = tiny.pair.params["target"]["lm_head.weight"]
    noise = np.random.default_rng(3).normal(size=head.shape).astype(np.float32) * PLANTED
    other = replace(
        tiny.pair, params=tiny.pair.params | {"target": tiny.pair.params["target"] | {"lm_head.weight": head + noise}}
    )
    engines = {"plain": engine_of(tiny.pair, "plain", requests, 2), "dflash": engine_of(other, "dflash", requests, 2)}
    laps = race(engines, requests)
    found = compared(judge(tiny.pair, requests), requests, {name: lap.outcomes() for name, lap in laps.items()})
    assert all(o.divergence is None for o in found["plain"])
    unequal = 0
    for request, own in zip(requests, found["dflash"], strict=True):
        right = greedy(tiny.target, request.prompt_ids, 12)
        if own.token_ids == right:
            assert own.divergence is None
            continue
        unequal += 1
        position = next(i for i in range(12) if right[i] != own.token_ids[i])
        logits = target_pass(tiny.target, [*request.prompt_ids, *right[:position]])[0][-1]
        assert own.divergence.position == position
        gap = float(logits[right[position]] - logits[own.token_ids[position]])
        assert own.divergence.gap == pytest.approx(gap, abs=1e-4) and gap > 0
    assert 0 < unequal < 8
    one = Batch("x", 0, {"plain": 0, "dflash": 3}, *[{"plain": 1.0, "dflash": 1.0}] * 2, found)
    assert figures("x", "dflash", [one], 0).equality.equal == 8 - unequal


@pytest.mark.parametrize("seed", range(20))
def test_first_difference(seed: int) -> None:
    source = random.Random(seed)
    a = [source.randrange(3) for _ in range(source.randrange(1, 6))]
    b = [source.randrange(3) for _ in a]
    slow = [i for i in range(len(a)) if a[i] != b[i]]
    assert first_difference(a, b) == (slow[0] if slow else None)
    assert first_difference(a, a) is None
