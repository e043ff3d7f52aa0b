"""The Python API: prompts in, results or a stream of text out."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from bridge.positions import pages_for, power_of_two
from torch_dflash.engine import PAGE_SIZE, Engine, Request, Run, positions_needed
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.metrics import Stats, TraceEntry, accept_histogram, tau, tpot
from torch_dflash.pair import Pair
from torch_dflash.propose import Proposer
from torch_dflash.state import Capacity
from torch_dflash.tokenizer import Prompt, TextPieces, encode_prompt, eos_ids

MAX_ROWS = 8
STEPS_PER_DISPATCH = 8


@dataclass(frozen=True)
class Result:
    """The answer to one prompt. `token_ids` are the new tokens only; `text` is None for a target without a tokenizer.

    finish_reason: "stop" (the last token is a stop id) or "length" (budget or context used up). `trace` has one entry
    per round when asked for, else it is None.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    stats: Stats
    trace: list[TraceEntry] | None


def generate(
    pair: Pair,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int = 64,
    stop_token_ids: Sequence[int] = (),
    num_drafts: int | None = None,
    trace: bool = False,
    *,
    method: str | None = None,
    ignore_eos: bool = False,
    steps_per_dispatch: int = STEPS_PER_DISPATCH,
) -> list[Result]:
    """Greedy answers to a batch of any size, each token for token what the target alone would write.

    prompts: texts, chat message lists or lists of token ids. The model's own end-of-text ids stop a text (unless
    `ignore_eos`), and so do `stop_token_ids`; the stop id is the last token. num_drafts: drafts used per step,
    1..block_size-1, all by default. method: "dflash" (default where there is a drafter) or "plain", the baseline on
    the same path. Raises InputError.
    """
    proposer = pair.proposer(method, num_drafts)
    stop_ids = stop_ids_of(pair, stop_token_ids, ignore_eos)
    requests = [make_request(pair, i, p, max_new_tokens, stop_ids) for i, p in enumerate(_listed(prompts))]
    runs = {r.index: Run(r, 0.0, finish_reason="length") for r in requests if r.max_new_tokens == 0}
    engine, compile_time = start_engine(pair, proposer, requests, steps_per_dispatch)
    while engine is not None and not engine.idle:
        runs |= {run.request.index: run for run in engine.step()}
    return [_result(pair, runs[r.index], proposer, compile_time, trace) for r in requests]


def stream(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int = 64,
    stop_token_ids: Sequence[int] = (),
    num_drafts: int | None = None,
    *,
    method: str | None = None,
    ignore_eos: bool = False,
    steps_per_dispatch: int = 1,
) -> Iterator[str]:
    """The answer to one prompt, piece by piece as it is accepted. The pieces together are `generate`'s text."""
    if pair.tokenizer is None:
        raise InputError("stream needs a tokenizer, and the target has none: use generate for token ids")
    moves = follow(
        pair,
        prompt,
        max_new_tokens,
        stop_token_ids,
        num_drafts,
        method=method,
        ignore_eos=ignore_eos,
        steps_per_dispatch=steps_per_dispatch,
    )
    return _pieces(pair, moves)


def _pieces(pair: Pair, moves: Iterator["Move"]) -> Iterator[str]:
    pieces = TextPieces(pair.tokenizer)
    for move in moves:
        if piece := pieces.feed(move.token_ids):
            yield piece
    if piece := pieces.finish():
        yield piece


@dataclass(frozen=True)
class Move:
    """What one dispatch added. `drafted[i]`: token i came from an accepted draft. `result` is there at the end only."""

    token_ids: list[int]
    drafted: list[bool]
    result: Result | None


def follow(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int = 64,
    stop_token_ids: Sequence[int] = (),
    num_drafts: int | None = None,
    *,
    method: str | None = None,
    ignore_eos: bool = False,
    steps_per_dispatch: int = 1,
) -> Iterator[Move]:
    """One prompt, watched: a `Move` after prefill and after every dispatch. The last has the result, with its trace."""
    proposer = pair.proposer(method, num_drafts)
    request = make_request(pair, 0, prompt, max_new_tokens, stop_ids_of(pair, stop_token_ids, ignore_eos))
    engine, compile_time = start_engine(pair, proposer, [request], steps_per_dispatch)
    return _moves(pair, proposer, request, engine, compile_time)


def _moves(
    pair: Pair, proposer: Proposer, request: Request, engine: Engine | None, compile_time: float
) -> Iterator[Move]:
    run, seen = Run(request, 0.0, finish_reason="length"), 0  # stands when the budget is 0 and nothing runs
    while engine is not None and not engine.idle:
        for run in engine.step():
            if run.finish_reason is None:
                yield Move(run.token_ids[seen:], run.drafted[seen:], None)
                seen = len(run.token_ids)
    result = _result(pair, run, proposer, compile_time, trace=True)
    yield Move(run.token_ids[seen:], run.drafted[seen:], result)


def _listed(prompts: Any) -> list[Prompt]:
    """A single text, message list or id list is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
        raise InputError(f"prompts is {prompts!r}: give a list of texts, message lists or lists of token ids")
    listed = list(prompts)
    if not listed:
        raise InputError("prompts is empty: give at least one prompt")
    single = all(isinstance(item, Integral) for item in listed) or all(isinstance(item, Mapping) for item in listed)
    return [listed] if single else listed


def stop_ids_of(pair: Pair, stop_token_ids: Sequence[int], ignore_eos: bool) -> tuple[int, ...]:
    """The ids that end a text: the user's and, unless `ignore_eos`, the model's own. Raises InputError."""
    if not isinstance(stop_token_ids, Iterable):
        raise InputError(f"stop_token_ids is {stop_token_ids!r}: give a list of token ids, empty for none")
    highest = pair.target.config.vocab_size - 1
    asked = [checked_integer(token, "an id in stop_token_ids", 0, highest) for token in stop_token_ids]
    own = () if ignore_eos else eos_ids(pair.tokenizer, pair.target.config.eos_token_ids)
    own = tuple(token for token in own if token <= highest)  # one that the target cannot write stops nothing
    return tuple(sorted({*own, *asked}))


def make_request(pair: Pair, index: int, prompt: Prompt, max_new_tokens: int, stop_ids: tuple[int, ...]) -> Request:
    """The request of a prompt. Its budget ends at the target's context limit. Raises InputError."""
    budget = checked_integer(max_new_tokens, "max_new_tokens", 0)
    ids = encode_prompt(prompt, pair.tokenizer, pair.target.config.vocab_size)
    limit = pair.target.config.context_limit
    if len(ids) >= limit:
        raise InputError(f"prompt has {len(ids)} tokens and the target's context {limit}: shorten it")
    return Request(index, tuple(ids), min(budget, limit - len(ids)), stop_ids)


def start_engine(
    pair: Pair, proposer: Proposer, requests: list[Request], steps_per_dispatch: int
) -> tuple[Engine | None, float]:
    """A warm engine with the requests queued, and the seconds that took. None when nothing is to be run."""
    steps = checked_integer(steps_per_dispatch, "steps_per_dispatch", 1)
    wanted = [r for r in requests if r.max_new_tokens > 0]
    if not wanted:
        return None, 0.0
    begin = time.perf_counter()
    longest = max(positions_needed(r, proposer) for r in wanted)
    rows = min(power_of_two(len(wanted)), MAX_ROWS)
    most = pages_for(pair.target.config.context_limit + proposer.num_drafts, PAGE_SIZE)
    pages_per_row = min(power_of_two(pages_for(longest, PAGE_SIZE)), most)
    steps = min(steps, power_of_two(max(r.max_new_tokens for r in wanted)))
    engine = Engine(pair, proposer, Capacity(rows, pages_per_row, PAGE_SIZE), steps)
    for request in wanted:
        engine.submit(request)
    engine.warm_up()
    return engine, time.perf_counter() - begin


def _result(pair: Pair, run: Run, proposer: Proposer, compile_time: float, trace: bool) -> Result:
    ids = run.token_ids
    text = None if pair.tokenizer is None else pair.tokenizer.decode(ids, skip_special_tokens=True)
    stats = Stats(
        prompt_tokens=len(run.request.prompt_ids),
        new_tokens=len(ids),
        steps=len(run.trace),
        tau=tau(len(ids), len(run.trace)),
        accept_histogram=accept_histogram([entry.accepted for entry in run.trace], proposer.num_drafts),
        ttft=run.first_token_at - run.begin,
        tpot=tpot(run.first_token_at, run.last_token_at, len(ids)),
        tokens_per_second=len(ids) / (run.last_token_at - run.begin) if ids else 0.0,
        compile_time=compile_time,
    )
    assert run.finish_reason is not None
    return Result(ids, text, run.finish_reason, stats, run.trace if trace else None)
