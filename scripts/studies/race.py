"""What the cost model needs of a set: its parts and a race of the engines, prompt by prompt in turns."""

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from studies.cost_model import DFLASH, STEP, Host, Measured
from studies.parts import Part, drafting, free_drafts, make_device, most_growth, rounds, whole_step
from torch_dflash.bench.datasets import Dataset
from torch_dflash.bench.methods import PLAIN
from torch_dflash.bench.race import race
from torch_dflash.bench.records import Batch
from torch_dflash.bench.runner import Bench, requests_of, warm_engine
from torch_dflash.device import Device
from torch_dflash.engine import Engine
from torch_dflash.errors import InputError
from torch_dflash.pair import Pair
from torch_dflash.propose import DFlash, Proposer
from torch_dflash.requests import Request
from torch_dflash.service import make_pace

ROUNDS = 2  # of costs before each prompt


def bench_for(max_new_tokens: int, steps_per_dispatch: int) -> Bench:
    """Greedy, one row, all drafts, chat template where there is one."""
    return Bench(tuple(STEP), 1, max_new_tokens, 0.0, 0, {}, steps_per_dispatch, chat=True, thinking=False)


def measure(pair: Pair, bench: Bench, dataset: Dataset) -> Measured:
    """Of one set. Raises InputError for prompts that do not fit, and where no prompt has a second token."""
    requests = requests_of(pair, dataset, bench)
    engines = {name: warm_engine(pair, make_pace(pair, name, None), requests, bench) for name in STEP}
    hosts = {name: Host(between_dispatches(e, requests[0]), e.device.max_steps) for name, e in engines.items()}
    parts = parts_for(pair, engines)
    drafts = engines[DFLASH].pace.proposers[0].num_drafts
    timed = {(width, name): (part, context_for(width, drafts)) for (width, name), part in parts.items()}
    batches, costs = [], []
    every = rounds(timed, ROUNDS * len(requests))
    for number, request in enumerate(requests):
        costs += islice(every, ROUNDS)
        batches.append(_raced(dataset.name, number, engines, request))
    if not any(o.accepted for batch in batches for o in batch.outcomes[DFLASH]):
        raise InputError(f"--dataset {dataset.name}: no answer has a second token; raise --max-new-tokens")
    return Measured(batches, costs, hosts)


def _raced(dataset: str, number: int, engines: Mapping[str, Engine], request: Request) -> Batch:
    laps = race(engines, [request])
    drafts = {name: engine.pace.proposers[0].num_drafts for name, engine in engines.items()}
    seconds = {name: lap.seconds for name, lap in laps.items()}
    outcomes = {name: lap.outcomes() for name, lap in laps.items()}
    return Batch(dataset, number, drafts, dict.fromkeys(engines, 0.0), seconds, outcomes)


def between_dispatches(engine: Engine, request: Request) -> float:
    """Seconds of the host from one dispatch to the next, a mean over one answer that no stop ends."""
    # Read backwards, so that the race finds nothing of this prompt in the pages.
    run = engine.submit(replace(request, prompt_ids=request.prompt_ids[::-1], stop_ids=()))
    while not run.decoding:
        engine.step()
    inside, begin, dispatches = engine.dispatch_seconds, time.perf_counter(), 0
    while not engine.idle:
        engine.step()
        dispatches += 1
    seconds = time.perf_counter() - begin - (engine.dispatch_seconds - inside)
    return seconds / dispatches if dispatches else 0.0


def parts_for(pair: Pair, engines: Mapping[str, Engine]) -> dict[tuple[int, str], Part]:
    """(width, part) -> the part, in memory of the engines' shapes."""
    full = pair.proposer("dflash", None)
    assert isinstance(full, DFlash)
    plain, free = pair.proposer("plain", None), free_drafts(full, full.num_drafts)
    device, alone = _device_like(engines[DFLASH], full, free), _device_like(engines[PLAIN], plain)
    own = {DFLASH: whole_step(device, full), "verify": whole_step(device, free), "draft": drafting(device, full)}
    parts = {(width, name): part for width in widths(engines[DFLASH]) for name, part in own.items()}
    return parts | {(width, PLAIN): whole_step(alone, plain) for width in widths(engines[PLAIN])}


def _device_like(engine: Engine, *proposers: Proposer) -> Device:
    return make_device(engine.pair, proposers, engine.capacity, engine.device.num_stop_ids)


def widths(engine: Engine) -> list[int]:
    """Positions that attention may read of a row."""
    size = engine.capacity.page_size
    return [n * size for n in engine.pair.target.platform.page_widths(engine.capacity.pages_per_row, size)]


def context_for(width: int, num_drafts: int) -> int:
    """As long as it may be for all steps of a part to stay within the width."""
    return max(width - most_growth(num_drafts), 1)
