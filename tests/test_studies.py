"""The arithmetic of the studies on cases by hand and against slow twins; runs of the command are in test_study_runs."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from studies import cost_model, decay, geometric, tau_of_k, verify_cost
from studies.output import shown, spread
from studies.parts import Cost
from studies.trace import Trace, accepted_shares, interval, resampled

from torch_dflash.bench.figures import Spread
from torch_dflash.bench.records import Batch, Outcome


def outcome(*accepted: int, prompt: int = 10, ids: list[int] | None = None, seconds: float = 1.0) -> Outcome:
    kept = 1 + sum(accepted) + len(accepted)
    return Outcome(list(range(kept)) if ids is None else ids, list(accepted), "length", prompt, 0.5, seconds)


def test_tau_cut_off_by_hand() -> None:
    histogram = [1, 2, 0, 1]  # a = 0, 1, 1, 3
    assert [geometric.truncated_tau(histogram, k) for k in (1, 2, 3)] == [1 + 3 / 4, 1 + 4 / 4, 1 + 5 / 4]
    assert geometric.fitted_alpha(histogram) == 5 / (5 + 3)
    assert accepted_shares(np.array(histogram)).tolist() == [3 / 4, 1 / 4, 1 / 4]
    assert geometric.fitted_alpha([0, 0, 4]) == 1 and geometric.fitted_alpha([4, 0, 0]) == 0


def test_the_fit_is_the_likeliest_alpha() -> None:
    histogram = [30, 11, 9, 5, 20]

    def log_likelihood(alpha: float) -> float:
        chances = [alpha**a * (1 - alpha) for a in range(4)] + [alpha**4]
        return sum(count * math.log(chance) for count, chance in zip(histogram, chances, strict=True))

    fitted = geometric.fitted_alpha(histogram)
    grid = np.linspace(0.01, 0.99, 981)
    best = max(grid, key=log_likelihood)
    assert abs(fitted - best) < 0.001


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.86, 1.0])
def test_the_model_is_a_sum_of_powers(alpha: float) -> None:
    for k in (1, 2, 7, 16):
        assert geometric.geometric_tau(alpha, k) == pytest.approx(sum(alpha**j for j in range(k + 1)))
        step = 1e-6
        if 0 < alpha < 1:
            rise = geometric.geometric_tau(alpha + step, k) - geometric.geometric_tau(alpha - step, k)
            assert geometric.slope_in_alpha(alpha, k) == pytest.approx(rise / (2 * step), rel=1e-6)
            further = geometric.geometric_tau(alpha, k + step) - geometric.geometric_tau(alpha, k - step)
            assert geometric.slope_in_k(alpha, k) == pytest.approx(further / (2 * step), rel=1e-4)
    assert geometric.slope_in_k(alpha, 5) >= 0


def test_published_share_of_the_limit() -> None:
    """Google's "91% with K = 16 at alpha .86" counts the anchor: 15 drafts."""
    assert geometric.geometric_share(0.86, 15) == pytest.approx(0.91, abs=0.001)
    as_far = geometric.alpha_for(geometric.geometric_tau(0.7, 16), 7)
    assert as_far is not None and sum(as_far**j for j in range(8)) == pytest.approx(sum(0.7**j for j in range(17)))
    assert geometric.alpha_for(9.0, 7) is None
    assert geometric.alpha_for(geometric.geometric_tau(0.4, 7), 7) == pytest.approx(0.4)


def test_the_measured_decay_is_continued_by_hand() -> None:
    shares = [0.8, 0.4, 0.2, 0.1]  # the last three: 0.7 of 1.4
    assert geometric.tail_alpha(shares) == pytest.approx(0.5)
    assert geometric.continued_tau(shares, 3) == pytest.approx(2.4)
    assert geometric.continued_tau(shares, 6) == pytest.approx(2.5 + 0.05 + 0.025)
    assert geometric.continued_tau(shares, math.inf) == pytest.approx(2.5 + 0.1)
    assert geometric.tail_alpha([0.5, 0.25]) == pytest.approx(0.75 / 1.5)
    assert geometric.continued_tau([0.5, 0.0, 0.0, 0.0, 0.0], 16) == 1.5
    assert geometric.continued_tau([1.0, 1.0], 16) == 17 and geometric.continued_tau([1.0], math.inf) == math.inf


def trace(**outcomes: list[Outcome]) -> Trace:
    return Trace(Path("run"), {"num_drafts": None}, 3, outcomes)


def test_decay_by_hand() -> None:
    (found,) = decay.decays(trace(a=[outcome(3, 0), outcome(1)]))
    assert (found.prompts, found.steps, found.share) == (2, 3, (2 / 3, 1 / 3, 1 / 3))
    assert found.tau == pytest.approx(1 + 4 / 3)
    assert found.conditional == (2 / 3, 0.5, 1.0)
    assert all(low <= s <= high for low, s, high in zip(found.low, found.share, found.high, strict=True))
    assert (found.low[0], found.high[0]) == (0.5, 1.0)  # of draws of the first prompt alone, of the second alone
    assert decay.conditional(np.array([0.5, 0.0, 0.0])) == (0.5, 0.0, None)
    text = "\n".join(decay.lines([found]))
    assert "| a | 2 | 3 | 2.33 | 0.67 (0.50-1.00) |" in text and "| a | 0.67 | 0.50 | 1.00 |" in text


def test_the_interval_resamples_prompts() -> None:
    histograms = np.array([[2, 1], [0, 3], [0, 0]])
    rows = np.random.default_rng(5).integers(3, size=(2000, 3))
    sums = [sum(histograms[i] for i in row) for row in rows]
    slow = [total[1] / total.sum() for total in sums if total.sum()]
    shares = accepted_shares(resampled(histograms, 5))[:, 0]
    assert len(slow) < 2000 and shares.tolist() == pytest.approx(slow)
    assert [bound.item() for bound in interval(shares)] == pytest.approx(list(np.percentile(slow, [2.5, 97.5])))


def test_shared_anchors_by_hand() -> None:
    """Full: anchors 0, 4, 5. With 1 draft: 0, 2, 4, 6, 7."""
    full, fewer = outcome(3, 0, 3), outcome(1, 1, 1, 0, 1)
    assert tau_of_k.anchors(full) == {0: 3, 4: 0, 5: 3}
    assert tau_of_k.shared(full, fewer) == [(3, 1), (0, 1)]
    parted = replace(fewer, token_ids=[0, 1, 2, 9, *range(4, 9)])
    assert tau_of_k.shared(full, parted) == [(3, 1)]
    (check,) = tau_of_k.checks(trace(a=[full]), [replace(trace(a=[fewer]), num_drafts=1)])
    assert (check.truncated, check.decoded) == (1 + 2 / 3, 1 + 4 / 5)
    assert (check.same_anchors, check.agreeing) == (2, 1)


def test_tau_of_k_by_hand() -> None:
    (found,) = tau_of_k.taus(trace(a=[outcome(3, 0), outcome(1, 1)]))
    assert found.measured == (1.75, 2.0, 2.25) and found.alpha == 5 / 8
    assert found.model == pytest.approx((1 + 5 / 8, 1 + 5 / 8 + 25 / 64, 1 + 5 / 8 + 25 / 64 + 125 / 512))
    assert found.share_model == pytest.approx((1 - (5 / 8) ** 4, 1 - (5 / 8) ** 17))
    worth = found.worth
    assert worth.one_more_draft == pytest.approx((5 / 8) ** 4)
    assert worth.more_alpha == pytest.approx(0.01 * (1 + 2 * 5 / 8 + 3 * 25 / 64))
    assert geometric.geometric_tau(worth.alpha_as_far, 3) == pytest.approx(found.far_model)
    text = "\n".join(tau_of_k.lines([found], []))
    assert "| measured | 1.75 | 2.00 | 2.25 |" in text and "| gap | -7.1% |" in text


COSTS = {
    64: {"plain": Cost(10, 1), "dflash": Cost(21, 2), "draft": Cost(5, 0), "verify": Cost(15, 0)},
    128: {"plain": Cost(12, 1), "dflash": Cost(25, 2), "draft": Cost(6, 0), "verify": Cost(18, 0)},
}
HOSTS = {"plain": cost_model.Host(0.5, 4), "dflash": cost_model.Host(1.0, 4)}


def test_steps_know_their_width() -> None:
    """58 + 4 fits in 64 positions, 62 + 4 does not."""
    assert cost_model.widths_of(outcome(3, 0, 1, prompt=58), 3, [64, 128]) == [64, 128, 128]
    assert cost_model.widths_of(outcome(0, prompt=126), 3, [64, 128]) == [128]  # only two positions are left
    own = outcome(3, 0, 1, prompt=58)
    assert cost_model.decode_seconds(own, "dflash", 3, COSTS, HOSTS["dflash"]) == 20 + 24 + 24 + 3
    plain = outcome(*[0] * 5, prompt=60)  # 60..64: the last one needs position 64
    assert cost_model.decode_seconds(plain, "plain", 0, COSTS, HOSTS["plain"]) == 4 * 10 + 12 + 2 * 1.5


def test_prediction_by_hand() -> None:
    plain, own = outcome(*[0] * 4, prompt=20, seconds=50.0), outcome(3, prompt=20, seconds=25.0)
    seconds = {"plain": 50.5, "dflash": 25.5}
    batch = Batch("a", 0, {"plain": 0, "dflash": 3}, seconds, seconds, {"plain": [plain], "dflash": [own]})
    round_ = {(width, part): cost for width, parts in COSTS.items() for part, cost in parts.items()}
    found = cost_model.predict(cost_model.Measured([batch], [round_], HOSTS))
    assert found.costs == COSTS and found.steps[128]["verify"] == Spread(18, 18, 18)
    assert (found.tau, found.measured, found.low) == (4, 2.0, None)
    assert found.model == pytest.approx((4 * 10 + 1.5) / (20 + 3))
    assert found.simple == pytest.approx(4 * (10 + 1.5 / 4) / (20 + 3 / 4))
    assert found.in_race == pytest.approx({"plain": 50 / 41.5, "dflash": 25 / 23})
    assert found.errors == pytest.approx((found.simple / 2 - 1, found.model / 2 - 1))
    text = "\n".join(cost_model.lines([found]))
    assert "| a | 64 | 10000.0 (10000.0-10000.0) | 5000.0 (5000.0-5000.0) |" in text
    assert "| 20000.0 | 21000.0 (21000.0-21000.0) | 1500.00 | 3000.00 |" in text
    assert "| a | 1 | 4.00 | 2.00 | 2.00 | +0.0% | 1.80 | -9.8% | 1.20 | 1.09 |" in text


def test_costs_are_means_and_shown_as_spreads() -> None:
    rounds = [{(64, "plain"): Cost(step, around)} for step, around in ((1, 9), (6, 7), (2, 8))]
    assert cost_model.mean_costs(rounds) == {64: {"plain": Cost(3, 8)}}
    assert cost_model.step_spreads(rounds) == {64: {"plain": Spread(2, 1, 6)}}


def test_verify_cost_by_hand() -> None:
    rounds = [
        {("float32", 2, 1): Cost(2.0, 0), ("float32", 2, 8): Cost(8.0, 0)},
        {("float32", 2, 1): Cost(4.0, 0), ("float32", 2, 8): Cost(8.0, 0)},
        {("float32", 2, 1): Cost(2.0, 0), ("float32", 2, 8): Cost(10.0, 0)},
    ]
    one, eight = verify_cost.points(rounds)
    assert one.seconds == Spread(2.0, 2.0, 4.0) and one.ratio == Spread(1.0, 1.0, 1.0)
    assert eight.seconds == Spread(8.0, 8.0, 10.0) and eight.ratio == Spread(4.0, 2.0, 5.0)
    assert verify_cost.measured_knee([one, eight]) == 2.0  # a token costs 1 second at 8, and one alone takes 2
    grid = verify_cost.checked_grid([8], [2], 64, 3)
    assert grid.tokens == (1, 8)
    ratios, _ = verify_cost.tpu_curves(grid)["v5p"]
    assert ratios[0] == 1 and ratios == sorted(ratios) and ratios[-1] > 2


def test_a_spread_is_shown() -> None:
    assert shown(spread([0.0031, 0.002, 0.0045]), 1, 1e3) == "3.1 (2.0-4.5)"
