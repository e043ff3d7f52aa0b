"""The host loop sentence by sentence, on the stand-in: nothing is compiled, texts and drafts are what a test wants."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from schedules import cut
from stand_in import Told, spell, stand_in_engine, tell

from torch_dflash import InputError
from torch_dflash.engine import Engine
from torch_dflash.metrics import TraceEntry
from torch_dflash.options import Sampling
from torch_dflash.pace import Steady
from torch_dflash.propose import Plain
from torch_dflash.requests import Request, Run
from torch_dflash.state import Capacity
from torch_dflash.tokenizer import TextPieces

ONE = Steady(Plain())  # one token a step
SMALL = Capacity.whole(4, 16, 4)


def prompt(length: int, first: int = 65) -> tuple[int, ...]:
    return (first, *range(1, length))


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def text_of(engine: Engine, run: Run) -> str:
    pieces = TextPieces(engine.pair.tokenizer, run.request.stop_strings)
    return pieces.feed(run.token_ids) + pieces.finish()


def test_a_long_prompt_does_not_stop_decoding_rows() -> None:
    """Between two of its chunks they move."""
    engine = stand_in_engine(Capacity.whole(2, 16, 64), 1024, 1, ONE)
    short = engine.submit(Request(0, prompt(5), 20, ()))
    engine.step()
    long, moves = engine.submit(Request(1, prompt(900), 4, ())), []
    while not long.token_ids:
        before = long.prefilled
        engine.step()
        moves.append("chunk" if long.prefilled > before else "decode")
    assert moves == ["decode", "chunk"] * 4
    assert len(short.token_ids) == 5
    finish(engine)


def test_a_dispatch_is_short_while_a_prompt_waits_for_its_next_chunk() -> None:
    engine = stand_in_engine(Capacity.whole(2, 16, 64), 1024, 8, ONE)
    short = engine.submit(Request(0, prompt(5), 30, ()))
    engine.step()
    long, moves = engine.submit(Request(1, prompt(900), 4, ())), []
    while not long.token_ids:
        before = len(short.token_ids)
        engine.step()
        moves.append(len(short.token_ids) - before)
    assert moves == [4, 0, 4, 0, 4, 0, 4, 0]
    finish(engine)


def test_prompts_are_processed_in_the_order_of_their_requests() -> None:
    """Not in the order of their rows: short ones that come and go in the first row would starve the others."""
    engine = stand_in_engine(Capacity.whole(2, 16, 64), 1024)
    engine.submit(Request(0, prompt(3), 1, ()))
    early = engine.submit(Request(1, prompt(600), 1, ()))
    engine.step()
    late = engine.submit(Request(2, prompt(600, first=66), 1, ()))
    while not early.token_ids:
        assert late.prefilled == 0
        engine.step()
    finish(engine)


def test_requests_wait_for_pages_in_order() -> None:
    """Two rows are free, and pages enough for the third request, but the second was first."""
    engine = stand_in_engine(Capacity(3, 8, 4, 11), 512)  # 10 pages
    runs = [engine.submit(Request(i, prompt(n, first=70 + i), 5, ())) for i, n in enumerate([16, 15, 2])]
    engine.step()
    assert [run.begin > 0 for run in runs] == [True, False, False]
    assert engine.pages.num_free >= 3
    while runs[0].finish_reason is None:
        assert list(engine.waiting) == runs[1:]
        engine.step()
    engine.step()
    assert runs[0].begin < runs[1].begin < runs[2].begin
    finish(engine)
    assert [run.finish_reason for run in runs] == ["length"] * 3


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "finished"])
def test_cancel(when: str) -> None:
    """A cancelled run keeps what it has, its row and pages are free at once, the other request does not notice."""
    engine = stand_in_engine(Capacity.whole(1 if when == "waiting" else 2, 16, 64), 1024, 1, ONE)
    other = engine.submit(Request(0, prompt(3), 12, ()))
    run = engine.submit(Request(1, prompt(600), 12 if when == "decoding" else 1, ()))
    steps = {"waiting": 3, "prefilling": 3, "decoding": 9, "finished": 9}[when]
    for _ in range(steps):
        engine.step()
    state = "waiting" if run in engine.waiting else "prefilling" if run.prefilled < 600 else "decoding"
    assert run.finish_reason == "length" if when == "finished" else state == when
    had = list(run.token_ids)
    assert bool(had) == (when in ("decoding", "finished"))
    engine.cancel(run)
    assert run.finish_reason == ("length" if when == "finished" else "cancelled")
    assert run not in engine.waiting and run not in engine.rows
    used = sum((row > 0).sum() for row in engine.pages.table())
    assert used == 1  # the other request's
    finish(engine)
    assert run.token_ids == had
    assert (len(other.token_ids), other.finish_reason) == (12, "length")


def test_finished_rows_cost_nothing() -> None:
    """The dispatches get narrower as rows finish; a lone request is a dispatch of one row."""
    engine = stand_in_engine(Capacity.whole(6, 16, 4), 512, 1, ONE)
    for i, budget in enumerate([2, 3, 3, 5, 5, 8]):
        engine.submit(Request(i, prompt(3, first=70 + i), budget, ()))
    finish(engine)
    assert engine.device.widths == [6, 6, 4, 4, 1, 1, 1]


def test_stream_goes_on_beside_other_requests() -> None:
    """Two streams in turns and a request without one; each is its own text."""
    engine = stand_in_engine(SMALL, 512)
    quiet = engine.submit(Request(0, prompt(4), 12, ()))
    asked = [Request(i, prompt(4, first=70 + i), 16, ()) for i in (1, 2)]
    streams, texts = [engine.stream(request) for request in asked], ["", ""]
    live = [0, 1]
    while live:
        for i in list(live):
            piece = next(streams[i], None)
            live = live if piece is not None else [j for j in live if j != i]
            texts[i] += piece or ""
    for request, text in zip(asked, texts, strict=True):
        alone = stand_in_engine(SMALL, 512)
        run = alone.submit(request)
        finish(alone)
        assert text == text_of(alone, run) and len(text) > 5
    finish(engine)
    assert len(quiet.token_ids) == 12


def test_leaving_a_stream_cancels_its_request_only() -> None:
    engine = stand_in_engine(SMALL, 512)
    other = engine.submit(Request(0, prompt(4), 12, ()))
    stream = engine.stream(Request(1, prompt(4, first=70), 30, ()))
    assert next(stream)
    (streamed,) = [run for run in engine.rows if run is not None and run is not other]
    stream.close()
    assert streamed.finish_reason == "cancelled" and streamed not in engine.rows
    assert 0 < len(streamed.token_ids) < 30
    finish(engine)
    assert len(other.token_ids) == 12


def test_what_can_never_be_served_is_refused_with_the_numbers() -> None:
    engine = stand_in_engine(Capacity(2, 8, 4, 7), 64)  # 6 pages of 4
    with pytest.raises(InputError, match=r"request 5 may need 25 positions, and a row has 24: .*max_new_tokens"):
        engine.submit(Request(5, prompt(12), 10, ()))
    with pytest.raises(InputError, match=r"request 6 has 60 prompt and up to 5 new tokens: .* at most 64 in all"):
        engine.submit(Request(6, prompt(60), 5, ()))
    with pytest.raises(InputError, match=r"request 7 has 0 prompt .* at least one prompt token"):
        engine.submit(Request(7, (), 5, ()))
    assert engine.idle
    engine.submit(Request(8, prompt(12), 9, ()))
    finish(engine)


def test_a_stream_needs_a_tokenizer() -> None:
    engine = stand_in_engine(SMALL, 512)
    engine.pair = replace(engine.pair, tokenizer=None)
    with pytest.raises(InputError, match="stream needs a tokenizer"):
        next(engine.stream(Request(0, prompt(4), 3, ())))


@pytest.mark.parametrize("budget", [0, 1, 3, 4, 5])  # blocks of 4
@pytest.mark.parametrize("wrong", [(), (2, 3, 7)], ids=["right", "some wrong"])
def test_budgets_are_exact(budget: int, wrong: Sequence[int]) -> None:
    answer = spell(random.Random(1), 12)
    engine = stand_in_engine(SMALL, 512, told=lambda asked: tell(asked, answer, wrong))
    run = engine.submit(Request(0, prompt(4), budget, ()))
    finish(engine)
    assert run.token_ids == list(answer[:budget])
    assert run.finish_reason == "length"
    assert [token for entry in run.trace for token in entry.emitted] == run.token_ids[1:]


ANSWER = "né a你🙂b a你🙂c."


def stopped(stops: tuple[str, ...], wrong: Sequence[int], max_steps: int, budget: int = 40) -> tuple[Run, str, str]:
    """The run, its text, and the joined stream of the same request, for ANSWER."""

    @functools.cache
    def told(asked: tuple[int, ...]) -> Told:
        return tell(asked, tuple(ANSWER.encode() + b"x" * 40), wrong)

    request = Request(0, prompt(4), budget, (), stop_strings=stops)
    engine = stand_in_engine(Capacity.whole(2, 16, 4), 512, max_steps, told=told)
    streamed = "".join(engine.stream(request))
    run = engine.submit(request)
    finish(engine)
    return run, text_of(engine, run), streamed


@pytest.mark.parametrize("wrong", [(), tuple(range(40)), (3, 8, 9, 17)], ids=["right", "wrong", "mixed"])
@pytest.mark.parametrize("max_steps", [1, 3])
def test_a_stop_string_anywhere(wrong: Sequence[int], max_steps: int) -> None:
    """Every piece of the text of up to 6 letters: over tokens, blocks, dispatches and letters of several bytes."""
    for length in (1, 2, 3, 6):
        for at in range(len(ANSWER) - length + 1):
            stop = ANSWER[at : at + length]
            run, text, streamed = stopped((stop,), wrong, max_steps)
            begin = ANSWER.index(stop)
            assert text == streamed == ANSWER[:begin]
            assert bytes(run.token_ids).decode() == ANSWER[: begin + length]  # the token that completes it is the last
            assert run.finish_reason == "stop"
            assert [token for entry in run.trace for token in entry.emitted] == run.token_ids[1:]


@pytest.mark.parametrize(
    ("stops", "budget", "text", "reason"),
    [
        (("b a", "你🙂b", "zzz"), 40, "né a", "stop"),  # whichever is complete first
        (("你🙂c", "c."), 40, "né a你🙂b a", "stop"),
        (("🙂bz",), 12, "né a你🙂", "length"),  # begun, cut off by the budget: given out
        (("b a你🙂c.z",), 24, ANSWER, "length"),
        (("zz",), 6, "né a\ufffd", "length"),  # the budget ends inside a letter
    ],
)
def test_several_stop_strings_and_unfinished_ones(stops: tuple[str, ...], budget: int, text: str, reason: str) -> None:
    run, given, streamed = stopped(stops, (2, 5, 11), 2, budget)
    assert (given, streamed, run.finish_reason) == (text, text, reason)


def test_a_stop_id_and_a_stop_string_end_a_text_together() -> None:
    for stop_ids, stops, length, reason in [
        ((ord("b"),), ("c.",), 13, "stop"),
        ((ord("."),), ("🙂b",), 13, "stop"),
        ((ord("a"), ord("b")), (), 5, "stop"),
        ((7,), ("q",), 20, "length"),
    ]:
        engine = stand_in_engine(SMALL, 512, told=lambda asked: tell(asked, tuple(ANSWER.encode() + b"x" * 20)))
        request = Request(0, prompt(4), 20, stop_ids, stop_strings=stops)
        run = engine.submit(request)
        finish(engine)
        ids, _, why = cut(request, tuple(ANSWER.encode()), list[TraceEntry]())
        assert (run.token_ids, run.finish_reason) == (ids, why)
        assert (len(ids), why) == (length, reason)


def test_a_seed_is_chosen_once_for_a_request() -> None:
    engine = stand_in_engine(SMALL, 512)
    runs = [engine.submit(Request(i, prompt(4), 3, (), Sampling(temperature=1.0))) for i in range(2)]
    assert len({run.choice.sampling.seed for run in runs} - {None}) == 2
    finish(engine)
