"""The measuring itself: every set's prompts, batch by batch, through all methods."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_dflash.bench.datasets import Dataset
from torch_dflash.bench.divergence import compared, judge
from torch_dflash.bench.race import race
from torch_dflash.bench.records import Batch
from torch_dflash.engine import Engine
from torch_dflash.errors import InputError
from torch_dflash.options import Sampling
from torch_dflash.pace import Pace
from torch_dflash.pair import Pair
from torch_dflash.requests import Request
from torch_dflash.service import engine_for, make_pace, make_request
from torch_dflash.tokenizer import as_chat, encode_prompt

WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Bench:
    """How it is measured. num_drafts: by method, a number or "auto"; the method's own where there is none. chat,
    thinking: see requests_of."""

    methods: tuple[str, ...]
    rows: int
    max_new_tokens: int
    temperature: float
    seed: int
    num_drafts: Mapping[str, int | str | None]
    steps_per_dispatch: int
    chat: bool
    thinking: bool


def requests_of(pair: Pair, dataset: Dataset, bench: Bench) -> list[Request]:
    """A set's prompts, through the chat template once if `chat` and there is one. `thinking` goes to templates that
    know it. Prompt i is drawn with seed + i, by every method. Raises InputError naming the line."""
    requests = []
    for i, text in enumerate(dataset.prompts):
        sampling = Sampling(temperature=bench.temperature, seed=(bench.seed + i) % 2**64)
        prompt = as_chat(text, pair.tokenizer) if bench.chat else text
        try:
            ids = encode_prompt(prompt, pair.tokenizer, pair.target.config.vocab_size, bench.thinking)
            requests.append(make_request(pair, ids, bench.max_new_tokens, sampling=sampling, index=i))
        except InputError as error:
            raise InputError(f"{dataset.origin}, line {i + 1}: {error}") from None
    return requests


def check_thinking(pair: Pair, bench: Bench) -> None:
    """Raises InputError where --thinking would change nothing."""
    template = getattr(pair.tokenizer, "chat_template", None) or ""
    if bench.thinking and "enable_thinking" not in str(template):
        raise InputError("--thinking is given, and the target's chat template has no enable_thinking: leave it out")


def measure(
    pairs: Mapping[str, Pair], bench: Bench, dataset: str, requests: Sequence[Request], done: int
) -> Iterator[Batch]:
    """The batches of a set from prompt number `done` on; compiles first, if there are any. pairs: by method, of one
    target."""
    if done >= len(requests):
        return
    engines, warm_up = {}, {}
    paces = {name: make_pace(pairs[name], name, bench.num_drafts.get(name)) for name in bench.methods}
    for name, pace in paces.items():
        begin = time.perf_counter()
        engines[name] = warm_engine(pairs[name], pace, requests, bench)
        warm_up[name] = time.perf_counter() - begin
    num_drafts = {name: pace.proposers[0].num_drafts for name, pace in paces.items()}
    referee = judge(next(iter(pairs.values())), requests)
    for first in range(done, len(requests), bench.rows):
        batch = requests[first : first + bench.rows]
        laps = race(engines, batch)
        seconds = {name: lap.seconds for name, lap in laps.items()}
        outcomes = compared(referee, batch, {name: lap.outcomes() for name, lap in laps.items()})
        yield Batch(dataset, first, num_drafts, warm_up, seconds, outcomes)
        warm_up = dict.fromkeys(warm_up, 0.0)


def warm_engine(pair: Pair, pace: Pace, requests: Sequence[Request], bench: Bench) -> Engine:
    """An engine large enough for all of a set's requests, with everything compiled that they may need, and a batch
    behind it: prompts read backwards, so that the real ones find nothing of theirs in the pages."""
    engine = engine_for(pair, pace, list(requests), bench.rows, bench.steps_per_dispatch)
    queued = [engine.submit(request) for request in requests]
    engine.warm_up()  # for all that is queued
    for run in queued:
        engine.cancel(run)
    for request in requests[: bench.rows]:
        tokens = min(WARM_UP_TOKENS, request.max_new_tokens)
        engine.submit(replace(request, prompt_ids=request.prompt_ids[::-1], max_new_tokens=tokens))
    while not engine.idle:
        engine.step()
    return engine
