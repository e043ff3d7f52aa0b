"""From what users say to what the engine takes: requests, and engines of the right size."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from bridge.positions import pages_for, power_of_two
from torch_dflash.device import Device
from torch_dflash.engine import PAGE_SIZE, Engine
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.options import GREEDY, Sampling
from torch_dflash.pace import Adaptive, Pace, Steady
from torch_dflash.pair import Pair
from torch_dflash.propose import DFlash
from torch_dflash.requests import Request, positions_needed
from torch_dflash.sampling import choose, choose_greedily
from torch_dflash.state import Capacity
from torch_dflash.tokenizer import Prompt, encode_prompt, eos_ids

MAX_ROWS = 8
STEPS_PER_DISPATCH = 8
STOP_IDS, BIASED_IDS = 8, 8  # of a request, before an open engine must compile again


def stop_ids_of(pair: Pair, stop_token_ids: Sequence[int] = (), ignore_eos: bool = False) -> tuple[int, ...]:
    """The ids that end a text: the user's and, unless `ignore_eos`, the model's own. Raises InputError."""
    if not isinstance(stop_token_ids, Iterable):
        raise InputError(f"stop_token_ids is {stop_token_ids!r}: give a list of token ids, empty for none")
    highest = pair.target.config.vocab_size - 1
    asked = [checked_integer(token, "an id in stop_token_ids", 0, highest) for token in stop_token_ids]
    own = () if ignore_eos else eos_ids(pair.tokenizer, pair.target.config.eos_token_ids)
    own = tuple(token for token in own if token <= highest)  # one that the target cannot write stops nothing
    return tuple(sorted({*own, *asked}))


def checked_stop(pair: Pair, stop: Any) -> tuple[str, ...]:
    """Stop strings. Raises InputError."""
    listed = [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, Sequence) or not all(isinstance(item, str) and item for item in listed):
        raise InputError(f"stop is {stop!r}: give texts, none of them empty")
    if listed and pair.tokenizer is None:
        raise InputError(f"stop is {stop!r}, and the target has no tokenizer: use stop_token_ids")
    return tuple(listed)


def make_request(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int,
    stop_ids: tuple[int, ...] | None = None,
    stop: str | Sequence[str] = (),
    *,
    sampling: Sampling = GREEDY,
    index: int = 0,
) -> Request:
    """The request of a prompt, for `Engine.submit`. Its budget ends at the target's context limit.

    stop_ids: see `stop_ids_of`; None means the model's own end-of-text ids. Raises InputError.
    """
    budget = checked_integer(max_new_tokens, "max_new_tokens", 0)
    ids = encode_prompt(prompt, pair.tokenizer, pair.target.config.vocab_size)
    limit = pair.target.config.context_limit
    if len(ids) >= limit:
        raise InputError(f"prompt has {len(ids)} tokens and the target's context {limit}: shorten it")
    if not isinstance(sampling, Sampling):
        raise InputError(f"sampling is {sampling!r}: give a Sampling")
    sampling.check_ids(pair.target.config.vocab_size)
    stop_ids = stop_ids_of(pair) if stop_ids is None else stop_ids
    return Request(index, tuple(ids), min(budget, limit - len(ids)), stop_ids, sampling, checked_stop(pair, stop))


def make_pace(pair: Pair, method: str | None, num_drafts: int | str | None) -> Pace:
    """A fixed number of drafts, or for "auto" as many as pay. Raises InputError."""
    if num_drafts != "auto":
        return Steady(pair.proposer(method, num_drafts))  # type: ignore[arg-type]
    full = pair.proposer(method, None)
    if full.num_drafts == 0:
        raise InputError('num_drafts is "auto": plain decoding drafts nothing, leave it out')
    if not isinstance(full, DFlash):
        raise InputError('num_drafts is "auto": that is for DFlash drafters, give an EAGLE-3 head a number')
    fewer = sorted({full.num_drafts, full.num_drafts // 2, 0}, reverse=True)
    return Adaptive(tuple(replace(full, num_drafts=n) for n in fewer))


def open_engine(
    pair: Pair,
    *,
    rows: int = MAX_ROWS,
    context: int | None = None,
    num_pages: int | None = None,
    page_size: int = PAGE_SIZE,
    method: str | None = None,
    num_drafts: int | str | None = None,
    steps_per_dispatch: int = STEPS_PER_DISPATCH,
) -> Engine:
    """An engine for requests that come and go: `submit`, `step`, `stream`, `cancel`. Warm: nothing is compiled later,
    unless a request has more than 8 stop ids (the model's own included) or biased ids.

    rows: requests at a time. context: positions that one request may fill, prompt and answer; the target's limit by
    default. num_pages: pages of K/V memory, shared by all rows; enough for all of them at their longest by default,
    with fewer some requests wait. page_size: positions of a page. Raises InputError, with the numbers, when the
    device's memory cannot hold that.
    """
    pace = make_pace(pair, method, num_drafts)
    limit = pair.target.config.context_limit
    groups = pair.target.platform.data
    rows, size = checked_integer(rows, "rows", 1), checked_integer(page_size, "page_size", 1)
    length = limit if context is None else checked_integer(context, "context", 2, limit, "the target's limit")
    whole = Capacity.whole(
        rows, pages_for(min(length + pace.proposers[0].num_drafts, limit), size), size, groups=groups
    )
    if num_pages is not None:
        # One request at its longest must fit, or it would wait for ever. NULL comes on top.
        why = f"{length} positions of context need {whole.pages_per_row} and the NULL page"
        least = whole.pages_per_row + 1
        whole = replace(whole, num_pages=checked_integer(num_pages, "num_pages", least, why=why))
    steps = checked_integer(steps_per_dispatch, "steps_per_dispatch", 1)
    engine = Engine(Device(pair, pace.proposers, whole, steps), pace)
    engine.device.num_stop_ids = max(STOP_IDS, power_of_two(len(stop_ids_of(pair))))
    engine.device.num_biased = BIASED_IDS
    engine.warm_up_all()
    return engine


def engine_for(
    pair: Pair, pace: Pace, requests: list[Request], most_rows: int, steps: int, finer_by: int = 8
) -> Engine:
    """An engine just large enough for these requests; shapes are powers of two, so that other batches can share its
    programs. Few buckets (`finer_by`): such an engine lives as long as its batch, and each is a program to compile."""
    limit, num_drafts = pair.target.config.context_limit, pace.proposers[0].num_drafts
    longest = max(positions_needed(r, num_drafts, limit) for r in requests)
    pages_per_row = min(power_of_two(pages_for(longest, PAGE_SIZE)), pages_for(limit, PAGE_SIZE))
    rows = min(power_of_two(len(requests)), most_rows)
    steps = min(steps, power_of_two(max(r.max_new_tokens for r in requests)))
    greedy = all(request.sampling.is_greedy for request in requests)
    capacity = Capacity.whole(rows, pages_per_row, PAGE_SIZE, finer_by, pair.target.platform.data)
    return Engine(Device(pair, pace.proposers, capacity, steps, choose_greedily if greedy else choose), pace)
