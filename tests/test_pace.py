"""How many drafts: made-up measurements in, decisions out."""

import itertools
import random
from collections import Counter

import pytest

from torch_dflash.pace import LONGER, PROBE_EVERY, PROBE_STEPS, Adaptive, Measured, Steady
from torch_dflash.propose import Plain

FULL, HALF, NONE = (Plain(num_drafts=n) for n in (7, 3, 0))


def drive(
    pace: Adaptive, rows: int, seconds: dict[Plain, float], accepted: list[int], dispatches: int
) -> list[tuple[Plain, int]]:
    """Choices of so many dispatches, if a step takes so long and the drafts are right so often."""
    chosen = []
    for _ in range(dispatches):
        proposer, steps = pace.choose(rows, 8)
        chosen.append((proposer, steps))
        used = [min(a, proposer.num_drafts) for a in accepted]
        pace.observe(Measured(rows, proposer, steps, steps * seconds[proposer], used))
    return chosen


def share(chosen: list[tuple[Plain, int]]) -> dict[Plain, float]:
    return {p: n / len(chosen) for p, n in Counter(proposer for proposer, _ in chosen).items()}


@pytest.mark.parametrize(
    ("seconds", "accepted", "best"),
    [
        ((1.0, 1.0, 1.0), [7, 5, 6], FULL),  # verifying is free, and drafts are right
        ((9.0, 5.0, 1.0), [7, 7, 7], NONE),  # 8 tokens for 9, 4 for 5, 1 for 1
        ((3.0, 1.5, 1.0), [3, 3, 3], HALF),
        ((3.0, 2.0, 1.0), [0, 0, 1], NONE),
    ],
)
def test_the_best_is_used_and_the_others_are_probed(
    seconds: tuple[float, float, float], accepted: list[int], best: Plain
) -> None:
    pace = Adaptive((FULL, HALF, NONE))
    chosen = drive(pace, 4, dict(zip((FULL, HALF, NONE), seconds, strict=True)), accepted, 200)
    assert [p for p, _ in chosen[:6]] == [FULL, FULL, HALF, HALF, NONE, NONE]  # all are measured first
    assert share(chosen[6:])[best] > 0.8
    for other in {FULL, HALF, NONE} - {best}:
        at = [i for i, (p, _) in enumerate(chosen) if p == other]
        gaps = [sum(steps for _, steps in chosen[a:b]) for a, b in itertools.pairwise(at)]
        assert gaps and max(gaps) <= LONGER * PROBE_EVERY + 16  # steps: never starved
        assert min(gaps[4:]) >= PROBE_EVERY  # and not in the way
        assert gaps[1] < PROBE_EVERY  # but seen again soon while little is known
    assert all(steps == (8 if p == best else PROBE_STEPS) for p, steps in chosen[6:])


def test_a_change_of_the_texts_is_noticed() -> None:
    seconds = {FULL: 2.0, HALF: 1.5, NONE: 1.0}
    pace = Adaptive((FULL, HALF, NONE))
    assert share(drive(pace, 1, seconds, [0, 0], 100))[NONE] > 0.8
    assert share(drive(pace, 1, seconds, [7, 6], 400)[200:])[FULL] > 0.8
    assert share(drive(pace, 1, seconds, [0, 0], 400)[200:])[NONE] > 0.8


def test_a_slow_spell_of_the_machine_changes_nothing() -> None:
    """Three times as slow for 20 dispatches, again and again: each lasts longer than a probe is away."""
    pace = Adaptive((FULL, HALF, NONE))
    drive(pace, 8, {FULL: 3.5, HALF: 2.5, NONE: 1.0}, [1] * 8, 40)
    for _ in range(10):
        slow = drive(pace, 8, {FULL: 10.5, HALF: 7.5, NONE: 3.0}, [1] * 8, 20)
        fast = drive(pace, 8, {FULL: 3.5, HALF: 2.5, NONE: 1.0}, [1] * 8, 20)
        assert share(slow)[NONE] > 0.75 and share(fast)[NONE] > 0.75


def test_the_first_dispatch_of_a_program_says_nothing() -> None:
    """It takes ten times as long, for the proposer that is the best."""
    pace, seconds, first = Adaptive((FULL, NONE)), {FULL: 3.0, NONE: 1.0}, {FULL: 3.0, NONE: 10.0}
    seen = set[Plain]()
    for _ in range(12):
        proposer, steps = pace.choose(8, 8)
        each = seconds[proposer] if proposer in seen else first[proposer]
        seen.add(proposer)
        pace.observe(Measured(8, proposer, steps, steps * each, [0]))
        last = proposer
    assert last == NONE


def test_numbers_of_rows_are_measured_apart() -> None:
    """Few rows: verifying is cheap. Many: it is not."""
    pace = Adaptive((FULL, NONE))
    few, many = {FULL: 1.0, NONE: 1.0}, {FULL: 60.0, NONE: 1.0}
    drive(pace, 1, few, [3], 20)
    drive(pace, 8, many, [3] * 8, 20)
    assert share(drive(pace, 1, few, [3], 50))[FULL] > 0.8
    assert share(drive(pace, 8, many, [3] * 8, 50))[NONE] > 0.8


def test_noise_and_few_steps_do_no_harm() -> None:
    """Any times, dispatches of one step, rows that are all finished: always one of its proposers, 1..max steps."""
    source, pace = random.Random(0), Adaptive((FULL, HALF, NONE))
    used = Counter[Plain]()
    for _ in range(500):
        rows, most = source.choice([1, 2, 8]), source.choice([1, 2, 8])
        proposer, steps = pace.choose(rows, most)
        assert proposer in pace.proposers and 1 <= steps <= most
        accepted = [source.randint(0, proposer.num_drafts) for _ in range(rows)]
        pace.observe(Measured(rows, proposer, steps, source.uniform(1e-6, 1.0), accepted))
        used[proposer] += 1
    assert min(used[p] for p in pace.proposers) > 10


def test_steady_is_steady() -> None:
    pace = Steady(HALF)
    pace.observe(Measured(1, HALF, 8, 1.0, [0]))
    assert pace.choose(1, 8) == (HALF, 8)
    assert pace.proposers == (HALF,)
