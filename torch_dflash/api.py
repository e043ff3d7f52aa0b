"""The Python API: prompts in, results or a stream of text out."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch_dflash.engine import Engine
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.metrics import Stats, TraceEntry, accept_histogram, tau, tpot
from torch_dflash.options import GREEDY, Choice, Sampling
from torch_dflash.pace import Pace
from torch_dflash.pair import Pair
from torch_dflash.requests import Request, Run
from torch_dflash.service import (
    MAX_ROWS,
    STEPS_PER_DISPATCH,
    checked_stop,
    engine_for,
    make_pace,
    make_request,
    stop_ids_of,
)
from torch_dflash.tokenizer import Prompt, TextPieces


@dataclass(frozen=True)
class Result:
    """The answer to one prompt. `token_ids` are the new tokens only; `text` is None for a target without a tokenizer.

    finish_reason: "stop" (a stop id, which is the last token, or a stop string, which `text` does not hold), "length"
    (budget or context used up) or "cancelled". logprobs: of each token under the target's own distribution, when asked
    for. seed: what was used where tokens were drawn. `trace` has one entry per round when asked for. Else these are
    None.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    stats: Stats
    trace: list[TraceEntry] | None
    logprobs: list[float] | None
    seed: int | None


def generate(
    pair: Pair,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int = 64,
    stop_token_ids: Sequence[int] = (),
    num_drafts: int | str | None = None,
    trace: bool = False,
    *,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    stop: str | Sequence[str] = (),
    method: str | None = None,
    ignore_eos: bool = False,
    rows: int | None = None,
    steps_per_dispatch: int = STEPS_PER_DISPATCH,
) -> list[Result]:
    """Answers to a batch of any size, each token for token what the target alone would write.

    prompts: texts, chat message lists or lists of token ids. The model's own end-of-text ids stop a text (unless
    `ignore_eos`), and so do `stop_token_ids`, the last token then, and `stop` strings. num_drafts: drafts used per
    step, 1..block_size-1, all by default; "auto" uses as many as pay, measured while it runs. sampling: for all
    prompts, or one for each; greedy by default. method: "dflash" (default where there is a drafter) or "plain", the
    baseline on the same path. rows: prompts at a time, at most 8 by default. Raises InputError.
    """
    pace = make_pace(pair, method, num_drafts)
    listed = _listed(prompts)
    stops = stop_ids_of(pair, stop_token_ids, ignore_eos), stop
    each = zip(listed, _sampling_of(sampling, len(listed)), strict=True)
    requests = [make_request(pair, p, max_new_tokens, *stops, sampling=s, index=i) for i, (p, s) in enumerate(each)]
    engine, runs, compile_time = _start(pair, pace, requests, rows, steps_per_dispatch)
    while engine is not None and not engine.idle:
        engine.step()
    return [_result(pair, run, pace, compile_time, trace) for run in runs]


def stream(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int = 64,
    stop_token_ids: Sequence[int] = (),
    num_drafts: int | str | None = None,
    *,
    sampling: Sampling = GREEDY,
    stop: str | Sequence[str] = (),
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
        sampling=sampling,
        stop=stop,
        method=method,
        ignore_eos=ignore_eos,
        steps_per_dispatch=steps_per_dispatch,
    )
    return _pieces(TextPieces(pair.tokenizer, checked_stop(pair, stop)), moves)


def _pieces(pieces: TextPieces, moves: Iterator["Move"]) -> Iterator[str]:
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
    num_drafts: int | str | None = None,
    *,
    sampling: Sampling = GREEDY,
    stop: str | Sequence[str] = (),
    method: str | None = None,
    ignore_eos: bool = False,
    steps_per_dispatch: int = 1,
) -> Iterator[Move]:
    """One prompt, watched: a `Move` after prefill and after every dispatch. The last has the result, with its trace."""
    pace = make_pace(pair, method, num_drafts)
    stop_ids = stop_ids_of(pair, stop_token_ids, ignore_eos)
    request = make_request(pair, prompt, max_new_tokens, stop_ids, stop, sampling=sampling)
    engine, (run,), compile_time = _start(pair, pace, [request], None, steps_per_dispatch)
    return _moves(pair, pace, run, engine, compile_time)


def _moves(pair: Pair, pace: Pace, run: Run, engine: Engine | None, compile_time: float) -> Iterator[Move]:
    seen = 0
    while engine is not None and not engine.idle:
        engine.step()
        if run.finish_reason is None and len(run.token_ids) > seen:
            yield Move(run.token_ids[seen:], run.drafted[seen:], None)
            seen = len(run.token_ids)
    result = _result(pair, run, pace, compile_time, trace=True)
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


def _sampling_of(sampling: Any, count: int) -> list[Sampling]:
    """One for each prompt."""
    listed = [sampling] * count if isinstance(sampling, Sampling) else sampling
    if not isinstance(listed, Sequence) or not all(isinstance(item, Sampling) for item in listed):
        raise InputError(f"sampling is {sampling!r}: give a Sampling, or one for each prompt")
    if len(listed) != count:
        raise InputError(f"sampling has {len(listed)} entries for {count} prompts: give one for each")
    return list(listed)


def _start(
    pair: Pair, pace: Pace, requests: list[Request], rows: int | None, steps_per_dispatch: int
) -> tuple[Engine | None, list[Run], float]:
    """A warm engine with the requests queued, their runs, and the seconds that took. No engine when nothing is to be
    run; a request for no tokens is finished at once."""
    steps = checked_integer(steps_per_dispatch, "steps_per_dispatch", 1)
    most = MAX_ROWS if rows is None else checked_integer(rows, "rows", 1)
    wanted = [r for r in requests if r.max_new_tokens > 0]
    begin = time.perf_counter()
    engine = engine_for(pair, pace, wanted, most, steps) if wanted else None
    runs = [engine.submit(r) if engine is not None and r.max_new_tokens > 0 else _nothing(r) for r in requests]
    if engine is not None:
        engine.warm_up()
    return engine, runs, time.perf_counter() - begin


def _nothing(request: Request) -> Run:
    """The run of a request for no tokens."""
    return Run(request, Choice(request.sampling.seeded(), (), 0), None, finish_reason="length")


def _result(pair: Pair, run: Run, pace: Pace, compile_time: float, trace: bool) -> Result:
    ids, sampling = run.token_ids, run.choice.sampling
    stats = Stats(
        prompt_tokens=len(run.request.prompt_ids),
        new_tokens=len(ids),
        steps=len(run.trace),
        tau=tau(len(ids), len(run.trace)),
        accept_histogram=accept_histogram([entry.accepted for entry in run.trace], pace.proposers[0].num_drafts),
        ttft=run.first_token_at - run.begin,
        tpot=tpot(run.first_token_at, run.last_token_at, len(ids)),
        tokens_per_second=len(ids) / (run.last_token_at - run.begin) if ids else 0.0,
        compile_time=compile_time,
    )
    assert run.finish_reason is not None
    return Result(
        token_ids=ids,
        text=text_of(pair, run),
        finish_reason=run.finish_reason,
        stats=stats,
        trace=run.trace if trace else None,
        logprobs=run.logprobs if sampling.logprobs else None,
        seed=sampling.seed if sampling.temperature > 0 else None,
    )


def text_of(pair: Pair, run: Run) -> str | None:
    """The text of a run, up to a stop string; None for a target without a tokenizer."""
    if pair.tokenizer is None:
        return None
    pieces = TextPieces(pair.tokenizer, run.request.stop_strings)
    return pieces.feed(run.token_ids) + pieces.finish()
