"""The engine on the device: warm, within memory, at the limits of both models, with drafting switched on and off."""

import logging

import pytest
from helpers import Loaded, compilations, golden_data, golden_pair, prompt_of, write_drafter

from torch_dflash import InputError, Pair, generate, load_pair, reference, stream
from torch_dflash.device import Device
from torch_dflash.memory import MemoryPlan, check_fits, device_memory, plan_memory
from torch_dflash.options import Sampling
from torch_dflash.requests import Request
from torch_dflash.service import BIASED_IDS, STOP_IDS, open_engine
from torch_dflash.state import Capacity

LONG = prompt_of(300)


def test_an_open_engine_compiles_nothing_later(tiny: Loaded) -> None:
    """Any prompt, alone or beside others, drawn, biased, stopped, cancelled, twice; and the answers are right."""
    engine = open_engine(tiny.pair, rows=2, num_pages=12)
    asked = [
        *[Request(i, tuple(p), 6, ()) for i, p in enumerate([LONG, prompt_of(5), LONG[:290], prompt_of(70)])],
        Request(4, tuple(prompt_of(130)), 6, tuple(range(STOP_IDS)), Sampling(temperature=0.7, seed=1, top_k=5)),
        Request(5, tuple(prompt_of(20)), 6, (), Sampling(logit_bias=dict.fromkeys(range(BIASED_IDS), 2.0))),
        Request(6, tuple(prompt_of(9)), 40, (), Sampling(logprobs=True, presence_penalty=0.5)),
    ]
    with compilations() as seen:
        runs = [engine.submit(request) for request in asked]
        while not engine.idle:
            engine.step()
            if len(runs[6].token_ids) > 3:
                engine.cancel(runs[6])
        again = engine.submit(asked[0])
        engine.step()  # its first 256 tokens are in the pages: one chunk, else it were two steps
        assert len(again.token_ids) == 1
        while not engine.idle:
            engine.step()
    assert seen == []
    for run in [*runs[:4], again]:
        expected = reference.dflash(tiny.target, tiny.drafter, tiny.config, run.request.prompt_ids, 6)
        assert (run.token_ids, run.trace) == expected
    assert runs[6].finish_reason == "cancelled"


def test_an_open_engine_is_refused_or_planned_with_the_numbers(tiny: Loaded, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match=r"2 row\(s\) of 512 positions, 1000000000 pages need [\d.]+ GB \(weights .*"):
        open_engine(tiny.pair, rows=2, num_pages=10**9)
    with pytest.raises(InputError, match=r"num_pages is 8: use an integer >= 9 .*512 positions of context need 8"):
        open_engine(tiny.pair, rows=2, num_pages=8)
    with pytest.raises(InputError, match=r"context is 513: use an integer in 2..512 \(the target's limit\)"):
        open_engine(tiny.pair, context=513)
    capacity, proposer = Capacity.whole(3, 2, 16), tiny.pair.proposer("dflash", None)
    with caplog.at_level(logging.INFO, "torch_dflash"):
        device = Device(tiny.pair, [proposer], capacity, 1)
    plan = plan_memory(tiny.pair.params, device.state)
    assert caplog.messages == [check_fits(plan, capacity)]
    state = device.state
    assert plan.pages == state.pool.nbytes and plan.draft == state.draft.pool.nbytes + sum(
        part.nbytes for part in (state.draft.context.features, state.draft.draft_len)
    )
    assert plan.other == 3 * 3 * 4 + 3 * 32 * 4  # three numbers a row, and its history
    assert plan.available == device_memory() > 10**9


def test_the_memory_line_by_example() -> None:
    plan = MemoryPlan(weights=8 * 10**9, pages=4 * 10**9, draft=10**9, other=0, available=13 * 10**9)
    shown = "8 row(s) of 64 positions, 33 pages"
    listed = "weights 8.00 GB, target K/V 4.00 GB, draft context 1.00 GB"
    assert check_fits(plan, Capacity.whole(8, 4, 16)) == f"memory for {shown}: {listed}"
    short = MemoryPlan(**vars(plan) | {"available": 13 * 10**9 - 1})
    with pytest.raises(InputError) as refused:
        check_fits(short, Capacity.whole(8, 4, 16))
    advice = "the device has 13.00 GB: lower rows, pages or context"
    assert str(refused.value) == f"{shown} need 13.00 GB ({listed}), {advice}"


@pytest.fixture(scope="module")
def short_drafter(tiny: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The tiny pair, whose drafter says that it has 24 positions."""
    draft = write_drafter(tmp_path_factory.mktemp("short"), max_position_embeddings=24)
    return load_pair(tiny.folder / "target", draft)


def test_a_drafter_with_fewer_positions_than_the_target(short_drafter: Pair, tiny: Loaded) -> None:
    """It drafts on, beyond them; the text is the target's."""
    (result,) = generate(short_drafter, prompt_of(14), 40, ignore_eos=True, trace=True, steps_per_dispatch=1)
    assert result.token_ids == reference.greedy(tiny.target, prompt_of(14), 40)
    expected = reference.dflash(tiny.target, tiny.drafter, tiny.config, prompt_of(14), 40)
    assert (result.token_ids, result.trace) == expected
    assert max(entry.start for entry in expected[1] if entry.accepted) > 24


def test_drafting_is_switched_on_and_off_in_the_middle(tiny: Loaded) -> None:
    """By measured times, so nobody knows when. The text stays, and every proposal is the reference's."""
    prompt = prompt_of(6)
    (result,) = generate(
        tiny.pair, prompt, 56, num_drafts="auto", ignore_eos=True, trace=True, rows=1, steps_per_dispatch=1
    )
    assert result.token_ids == reference.greedy(tiny.target, prompt, 56)
    ids = [*prompt, *result.token_ids]
    for entry in result.trace or ():
        _, features = reference.target_pass(tiny.target, ids[: entry.start], tiny.config.target_layer_ids)
        drafts = reference.draft_ids(tiny.target, tiny.drafter, tiny.config, features, ids[entry.start])
        assert entry.proposed == drafts[: len(entry.proposed)]
    used = [len(entry.proposed) for entry in result.trace or ()]
    assert used[:6] == [3, 3, 1, 1, 0, 0]
    assert max(used[6:]) > 0, "drafting is not taken up again"


def test_stop_strings_of_the_trained_pair() -> None:
    """Cut out of its own text, so that they begin and end anywhere in blocks."""
    pair, prompt = golden_pair("trained-bytes"), bytes(golden_data("trained-bytes")["prompts"][1]["prompt_ids"])
    options = {"max_new_tokens": 40, "steps_per_dispatch": 1}
    (free,) = generate(pair, list(prompt), **options)
    assert free.text is not None
    for at, length in [(0, 1), (3, 2), (7, 3), (11, 5), (16, 4), (21, 7)]:
        stop = free.text[at : at + length]
        (result,) = generate(pair, list(prompt), stop=[stop, "\x00never"], trace=True, **options)
        begin = free.text.index(stop)
        assert result.text == free.text[:begin]
        assert bytes(result.token_ids).decode() == free.text[: begin + length]
        assert result.finish_reason == "stop"
        assert [t for entry in result.trace or () for t in entry.emitted] == result.token_ids[1:]
        assert "".join(stream(pair, list(prompt), 40, stop=stop)) == result.text
