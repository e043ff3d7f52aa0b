"""Where two answers part, and how sure the target was there."""

from collections.abc import Sequence
from dataclasses import replace

from torch_dflash.bench.methods import PLAIN
from torch_dflash.bench.records import Divergence, Outcome
from torch_dflash.engine import Engine
from torch_dflash.options import Sampling
from torch_dflash.pair import Pair
from torch_dflash.requests import Request
from torch_dflash.service import engine_for, make_pace

CERTAIN = 1e6  # a bias that outweighs any logit


def judge(pair: Pair, requests: Sequence[Request]) -> Engine:
    """The engine that says how sure the target is: one row, long enough for all of these requests. Nothing is compiled
    before it is asked."""
    asking = [replace(request, sampling=_certain(0)) for request in requests]
    return engine_for(pair, make_pace(pair, PLAIN, None), asking, 1, 1)


def compared(
    engine: Engine, requests: Sequence[Request], outcomes: dict[str, list[Outcome]]
) -> dict[str, list[Outcome]]:
    """The outcomes, with where they leave plain decoding's; as they are where plain decoding did not run. `engine`: the
    judge."""
    if PLAIN not in outcomes:
        return outcomes
    plain = [outcome.token_ids for outcome in outcomes[PLAIN]]
    return {
        name: [
            replace(outcome, divergence=divergence(engine, request.prompt_ids, right, outcome.token_ids))
            for request, right, outcome in zip(requests, plain, some, strict=True)
        ]
        for name, some in outcomes.items()
    }


def divergence(
    engine: Engine, prompt_ids: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """None for equal answers. Else the first position where they differ, and the target's gap there, by one prefill of
    the prompt and what the answers share."""
    position = first_difference(plain, other)
    if position is None:
        return None
    shared = [*prompt_ids, *plain[:position]]
    return Divergence(position, logit_gap(engine, shared, plain[position], other[position]))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first other item; None for equal ones. Of answers that end by the same rules, none is the beginning
    of another."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def logit_gap(engine: Engine, ids: Sequence[int], token: int, other: int) -> float:
    """logit(token) - logit(other) behind ids: the difference of the two log-probabilities, each that of a request for
    one token which a bias makes certain."""
    requests = [Request(i, tuple(ids), 1, (), _certain(wanted)) for i, wanted in enumerate((token, other))]
    runs = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
    assert [run.token_ids for run in runs] == [[token], [other]]
    return runs[0].logprobs[0] - runs[1].logprobs[0]


def _certain(token: int) -> Sampling:
    """This token, and its log-probability without the bias."""
    return Sampling(logit_bias={token: CERTAIN}, logprobs=True, seed=0)
