"""Random schedules: each row equals its single run, whatever comes, waits, is cancelled and goes beside it."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from helpers import Loaded
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from schedules import Alone, Arrival, check_answer, cut, device_engine, device_schedule, play, times
from stand_in import LONGEST_ANSWER, spell, stand_in_engine, told

from bridge.positions import pages_for
from torch_dflash.engine import Engine
from torch_dflash.metrics import TraceEntry
from torch_dflash.pace import Adaptive, Pace, Steady
from torch_dflash.propose import Plain
from torch_dflash.requests import Request, Run
from torch_dflash.state import Capacity

RANDOM = st.randoms(use_true_random=False)
QUIET = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
STEMS = [spell(random.Random(seed), 700) for seed in range(3)]
STOPS = ["ab", "éa", "你b", "abca", "cc", "bé你", "caéb"]


@pytest.fixture(autouse=True, scope="module")
def invariants() -> Iterator[None]:
    """Every engine checks host against device after every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DFLASH_DEBUG", "1")
        yield


def random_engine(source: random.Random) -> Engine:
    """On the stand-in: any number of rows, pages from just enough for one to plenty, any proposers."""
    page_size, limit = (64, 1024) if source.random() < 0.15 else (source.choice([4, 8]), 50)
    rows, per_row = source.randint(1, 8), pages_for(limit, page_size)
    capacity = Capacity(rows, per_row, page_size, source.randint(per_row + 1, rows * per_row + 1))
    k = source.randint(0, 4)
    pace: Pace = Steady(Plain(num_drafts=k))
    if k == 4 and source.random() < 0.5:
        pace = Adaptive((Plain(num_drafts=4), Plain(num_drafts=2), Plain()))
    return stand_in_engine(capacity, limit, source.randint(1, 4), pace)


def random_request(source: random.Random, index: int, limit: int) -> Request:
    """A beginning that others may share, a tail, a budget of 0 up to all that is left, stops."""
    longest = 700 if limit > 700 else limit - 10
    prompt = source.choice(STEMS)[: source.randint(1, longest)] + spell(source, source.randint(0, 2))
    room = min(limit - len(prompt), LONGEST_ANSWER)
    budget = room if source.random() < 0.1 else min(source.randint(0, 14), room)
    stop_ids = tuple(source.sample(b"abc", source.randint(0, 2))) if source.random() < 0.2 else ()
    stop_strings = tuple(source.sample(STOPS, source.randint(1, 2))) if source.random() < 0.3 else ()
    return Request(index, prompt, budget, stop_ids, stop_strings=stop_strings)


def random_schedule(source: random.Random, limit: int) -> list[Arrival]:
    arrivals = []
    for index in range(source.randint(1, 8)):
        at, cancel_at = times(source)
        arrivals.append(Arrival(at, random_request(source, index, limit), cancel_at))
    return arrivals


def expected_rounds(request: Request, run: Run, limit: int) -> list[TraceEntry]:
    """What the told text leads to, with as many drafts in each round as the run has used."""
    text, start, rounds = told(request.prompt_ids), len(request.prompt_ids), list[TraceEntry]()
    for entry in run.trace:
        count = len(entry.proposed)
        accepted = text.accepted(start, min(count, limit - start - 1))
        emitted = list(text.ids[start + 1 : start + 2 + accepted])
        rounds.append(TraceEntry(start, text.drafts(start, count), accepted, emitted))
        start += len(emitted)
    return rounds


def test_schedules_on_the_stand_in() -> None:
    """2,000 of them. The stand-in checks every slot that is read or written."""
    seen = Counter[str]()

    @settings(QUIET, max_examples=2000)
    @given(RANDOM)
    def one(source: random.Random) -> None:
        engine = random_engine(source)
        limit = engine.pair.target.config.context_limit
        arrivals = random_schedule(source, limit)
        note(f"{engine.capacity}\n" + "\n".join(map(str, arrivals)))
        for arrival, run in zip(arrivals, play(engine, arrivals, seen), strict=True):
            rounds = expected_rounds(arrival.request, run, limit)
            ids = told(arrival.request.prompt_ids).ids[len(arrival.request.prompt_ids) :]
            check_answer(run, cut(arrival.request, ids, rounds), arrival.cancel_at is not None)
        seen.update(engine.device.seen)

    one()
    assert seen["schedules"] == 2000
    assert min(seen[name] for name in ("stop", "length", "cancelled", "hits", "waits for pages")) > 500, seen


def test_schedules_on_the_device(tiny: Loaded) -> None:
    """Two engines, used again and again: rows, pages and what is remembered come from other schedules."""
    engines, alone, seen = [device_engine(tiny, rows) for rows in (1, 6)], Alone(tiny), Counter[str]()

    @settings(QUIET, max_examples=200)
    @given(st.integers(0, 2**32 - 1))  # seeds: schedules that hypothesis draws piece by piece are mostly short ones
    def one(seed: int) -> None:
        source = random.Random(seed)
        engine, arrivals = source.choice(engines), device_schedule(source)
        note(f"{engine.capacity}\n" + "\n".join(map(str, arrivals)))
        clear(engine)
        expected = [alone(arrival.request, engine) for arrival in arrivals]
        for arrival, run, answer in zip(arrivals, play(engine, arrivals, seen), expected, strict=True):
            check_answer(run, answer, arrival.cancel_at is not None)

    one()
    for engine in engines:
        seen.update(engine.device.seen)
    assert min(seen[name] for name in ("stop", "length", "cancelled", "prefix hits", "waits for pages")) > 10, seen
    assert min(seen[f"dispatches of {rows}"] for rows in (1, 2, 4, 6)) > 2, seen


def clear(engine: Engine) -> None:
    """Of what a failed schedule has left."""
    for run in [*engine.rows, *engine.waiting]:
        if run is not None:
            engine.cancel(run)
