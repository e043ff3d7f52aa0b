"""Drafters made up for the test, put in at the seam: right always, never, now and then. What comes out is derived."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import pytest
from helpers import TARGET, Loaded, prompt_of, run_engine
from jax import Array

from torch_dflash import reference
from torch_dflash.block import Guess
from torch_dflash.engine import Engine
from torch_dflash.metrics import TraceEntry
from torch_dflash.propose import AllParams, Plain
from torch_dflash.requests import Request, Run
from torch_dflash.state import Capacity, DecodeState

VOCAB = TARGET["vocab_size"]
LENGTH = 64  # positions of a row
NEVER = 10**6


@dataclass(frozen=True)
class Told(Plain):
    """Knows the text of every row and drafts it, but a wrong token at positions divisible by the row's `wrong_at`."""

    texts: tuple[tuple[int, ...], ...] = ()  # the token at each position, prompt included
    wrong_at: tuple[int, ...] = ()

    def draft(self, params: AllParams, state: DecodeState, tables: Array, guess: Guess) -> tuple[Array, None]:
        position = state.committed_len[:, None] + 1 + jnp.arange(self.num_drafts)
        row = self.row(state)
        right = jnp.take_along_axis(jnp.array(self.texts)[row], jnp.minimum(position, LENGTH - 1), axis=1)
        wrong = position % jnp.array(self.wrong_at)[row][:, None] == 0
        return jnp.where(wrong, (right + 1) % VOCAB, right).astype(jnp.int32), None

    def row(self, state: DecodeState) -> Array:
        """int32[r]: which text each row of the dispatch writes: the one that begins with what the row holds."""
        width = min(LENGTH, state.history.shape[1])
        texts = jnp.array(self.texts)[:, :width]
        known = jnp.arange(width) <= state.committed_len[:, None]
        return (((state.history[:, None, :width] == texts) | ~known[:, None]).all(axis=2)).argmax(axis=1)

    def rounds(self, row: int, request: Request) -> list[TraceEntry]:
        """What this drafter must lead to, from the definitions alone."""
        text, start, left = self.texts[row], len(request.prompt_ids), request.max_new_tokens - 1
        rounds = []
        while left > 0 and (not rounds or rounds[-1].emitted[-1] not in request.stop_ids):
            wrong = [(start + 1 + j) % self.wrong_at[row] == 0 for j in range(self.num_drafts)]
            right = text[start + 1 : start + 1 + self.num_drafts]
            proposed = [(t + 1) % VOCAB if w else t for t, w in zip(right, wrong, strict=True)]
            accepted = [*wrong, True].index(True)
            emitted = _until_stop(text[start + 1 : start + 2 + accepted][:left], request.stop_ids)
            rounds.append(TraceEntry(start, proposed, accepted, emitted))
            start, left = start + accepted + 1, left - len(emitted)
        return rounds


def _until_stop(ids: Sequence[int], stop_ids: tuple[int, ...]) -> list[int]:
    for i, token in enumerate(ids):
        if token in stop_ids:
            return list(ids[: i + 1])
    return list(ids)


@pytest.fixture(scope="module")
def texts(tiny: Loaded) -> list[tuple[int, ...]]:
    """Prompts of lengths 2, 3 ... 9, each with its greedy continuation, LENGTH tokens in all."""
    prompts = [prompt_of(n) for n in range(2, 10)]
    return [(*p, *reference.greedy(tiny.target, p, LENGTH - len(p))) for p in prompts]


def run(tiny: Loaded, drafter: Told, requests: list[Request]) -> list[Run]:
    return run_engine(
        tiny.pair, drafter, requests, Capacity.whole(len(requests), 1, LENGTH, finer_by=8), after_step=no_row_runs_on
    )


def no_row_runs_on(engine: Engine) -> None:
    """The device has stopped exactly the rows that the host has given up."""
    running = [run is not None and run.decoding for run in engine.rows]
    assert [budget > 0 for budget in engine.device.state.budget.tolist()] == running


def request(texts: list[tuple[int, ...]], row: int, budget: int, stop_ids: tuple[int, ...] = ()) -> Request:
    return Request(row, texts[row][: row + 2], budget, stop_ids)


def check(drafter: Told, done: Run) -> None:
    """Tokens are the row's own text, rounds are the derived ones, and no step ran beyond the last one needed."""
    asked, row = done.request, done.request.index
    length = len(asked.prompt_ids)
    text = _until_stop(drafter.texts[row][length : length + asked.max_new_tokens], asked.stop_ids)
    assert done.token_ids == text
    assert done.finish_reason == ("stop" if text[-1] in asked.stop_ids else "length")
    if len(text) > 1:
        assert done.trace == drafter.rounds(row, asked)
    else:
        assert done.trace == []


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_right_drafts_are_kept_up_to_the_first_wrong_one(
    num_drafts: int, tiny: Loaded, texts: list[tuple[int, ...]]
) -> None:
    """Rows: always right, never right, wrong at every third, fourth and seventh position; together in one batch."""
    drafter = Told(num_drafts=num_drafts, texts=tuple(texts[:5]), wrong_at=(NEVER, 1, 3, 4, 7))
    runs = run(tiny, drafter, [request(texts, row, 20) for row in range(5)])
    for done in runs:
        check(drafter, done)
    assert len(runs[0].trace) == -(-19 // (num_drafts + 1))  # always right: num_drafts + 1 tokens a step
    assert len(runs[1].trace) == 19  # never right: one
    assert {entry.accepted for entry in runs[1].trace} == {0}


@pytest.mark.parametrize("wrong_at", [NEVER, 3])
def test_budgets_are_exact(wrong_at: int, tiny: Loaded, texts: list[tuple[int, ...]]) -> None:
    """Blocks of B = 4: budgets 1, B-1, B, B+1 and more; each row ends in its own step."""
    drafter = Told(num_drafts=3, texts=tuple(texts), wrong_at=(wrong_at,) * 8)
    budgets = [1, 2, 3, 4, 5, 6, 9, 10]
    for done in run(tiny, drafter, [request(texts, row, budget) for row, budget in enumerate(budgets)]):
        assert len(done.token_ids) == done.request.max_new_tokens
        check(drafter, done)


def test_stop_ids_end_a_row_wherever_they_turn_up(tiny: Loaded, texts: list[tuple[int, ...]]) -> None:
    """As the first token, as an accepted draft, as a bonus, twice in a block, behind the budget, and never."""
    drafter = Told(num_drafts=3, texts=tuple(texts), wrong_at=(NEVER,) * 8)
    new = [text[row + 2 :] for row, text in enumerate(texts)]
    stops = [(new[0][0],), (new[1][2],), (new[2][4],), (new[3][3], new[3][2]), (new[4][20],), (), (new[6][1],), (0,)]
    runs = run(tiny, drafter, [request(texts, row, 12, stop_ids) for row, stop_ids in enumerate(stops)])
    for done in runs:
        check(drafter, done)
    assert runs[0].token_ids == [new[0][0]]
    assert {done.finish_reason for done in runs} == {"stop", "length"}
    assert any(1 < len(done.token_ids) < 12 for done in runs)


def test_plain_decoding_is_one_token_a_step(tiny: Loaded, texts: list[tuple[int, ...]]) -> None:
    requests = [request(texts, row, budget) for row, budget in enumerate((1, 2, 9))]
    runs = run_engine(tiny.pair, Plain(), requests, Capacity.whole(4, 1, LENGTH))
    for row, done in enumerate(runs):
        budget = done.request.max_new_tokens
        assert tuple(done.token_ids) == texts[row][row + 2 : row + 2 + budget]
        assert [(entry.proposed, entry.accepted) for entry in done.trace] == [([], 0)] * (budget - 1)


def test_a_drafter_can_be_exchanged_without_touching_the_text(tiny: Loaded, texts: list[tuple[int, ...]]) -> None:
    """The seam: no state, taps of its own, fewer drafts; the tokens stay."""
    told = Told(num_drafts=2, texts=tuple(texts[:2]), wrong_at=(2, 5), taps=(1, 0))
    for done in run(tiny, told, [request(texts, row, 9) for row in range(2)]):
        check(told, done)
