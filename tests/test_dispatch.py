"""What a dispatch may do to the device: no compilation, no copy of the state, no talk with the host, no stray write."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Loaded, compilations, prompt_of

from bridge.platform import to_storage
from torch_dflash import generate
from torch_dflash.decode import decode_program, prefill_program
from torch_dflash.device import Device
from torch_dflash.engine import Engine
from torch_dflash.invariants import check_invariants
from torch_dflash.options import NOTHING, row_options
from torch_dflash.pace import Steady
from torch_dflash.requests import Request, Run
from torch_dflash.sampling import choose, choose_greedily
from torch_dflash.state import Capacity, Chunk, DecodeState, Until

PROMPTS = [prompt_of(n) for n in (5, 1, 16, 9, 7)]
POISON = 1e4


def engine_with(tiny: Loaded, prompts: list[list[int]] = PROMPTS, pages_per_row: int = 2, steps: int = 2) -> Engine:
    pace = Steady(tiny.pair.proposer("dflash", None))
    capacity = Capacity.whole(4, pages_per_row, 16, finer_by=4)
    engine = Engine(Device(tiny.pair, pace.proposers, capacity, steps, choose_greedily), pace)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(index, tuple(prompt), 9, ()))
    return engine


def finish(engine: Engine) -> dict[int, tuple]:
    runs: dict[int, Run] = {}
    while not engine.idle:
        runs |= {run.request.index: run for run in engine.step()}
    return {index: (run.token_ids, run.trace) for index, run in runs.items()}


def decoding(engine: Engine) -> Engine:
    """The engine, moved on until a row decodes."""
    while not any(run is not None and run.decoding for run in engine.rows):
        engine.step()
    return engine


@pytest.fixture(scope="module")
def clean(tiny: Loaded) -> dict[int, tuple]:
    """The answers of an undisturbed engine."""
    return finish(engine_with(tiny))


def test_compilations_are_counted() -> None:
    with compilations() as seen:
        jax.jit(lambda x: x * 3 + 41)(jnp.zeros(7))
    assert seen


def test_warm_up_compiles_everything(tiny: Loaded) -> None:
    """Several prompts, widths, rows and dispatches, and not one compilation behind the warm-up."""
    jax.clear_caches()  # or an earlier test might hide a compilation
    prompts = [*PROMPTS, prompt_of(40)]
    engine = engine_with(tiny, prompts, pages_per_row=4)
    with compilations() as warming:
        engine.warm_up()
    with compilations() as seen:
        answers = finish(engine)
    assert warming
    assert seen == []
    assert len(answers) == len(prompts)


def test_warm_up_leaves_no_trace(tiny: Loaded, clean: dict[int, tuple]) -> None:
    engine = engine_with(tiny)
    engine.warm_up()
    for part in jax.tree.leaves(engine.device.state):
        assert not np.asarray(part).any()
    assert finish(engine) == clean


def test_a_second_generation_compiles_nothing(tiny: Loaded) -> None:
    arguments = {"max_new_tokens": 6, "ignore_eos": True}
    generate(tiny.pair, PROMPTS[:2], **arguments)
    with compilations() as seen:
        generate(tiny.pair, PROMPTS[3:], **arguments)
        generate(tiny.pair, [PROMPTS[2], PROMPTS[0]], stop_token_ids=[3], **arguments | {"max_new_tokens": 11})
    assert seen == []


def test_the_state_is_donated(tiny: Loaded) -> None:
    engine = engine_with(tiny)
    where = engine.device.state.pool.unsafe_buffer_pointer()
    cache = engine.device.state.draft.pool.unsafe_buffer_pointer()
    while not engine.idle:
        before = engine.device.state
        engine.step()
        assert all(part.is_deleted() for part in jax.tree.leaves(before))
        assert engine.device.state.pool.unsafe_buffer_pointer() == where
        assert engine.device.state.draft.pool.unsafe_buffer_pointer() == cache


def test_a_dispatch_does_not_talk_to_the_host(tiny: Loaded) -> None:
    engine = engine_with(tiny)
    target, proposer, params = tiny.pair.target, engine.pace.proposers[0], tiny.pair.params
    tables, rows, one = engine.pages.table(), np.arange(4, dtype=np.int32), np.zeros(1, np.int32)
    options, first = row_options([NOTHING] * 4, 1, 1), row_options([NOTHING], 1, 1)
    state, prompts = engine.device.state, np.zeros((1, 32), np.int32)
    decode = decode_program(target.platform).lower(
        target, proposer, choose, 2, params, state, rows, tables, options, Until(np.int32(2), np.int32(1))
    )
    chunk = Chunk(np.zeros((1, 16), np.int32), one, one)
    prefill = prefill_program().lower(
        target, proposer, choose, params, state, one, tables[:1], first, prompts, one, chunk
    )
    for program in (decode.as_text(), prefill.as_text()):
        assert "stablehlo.dot_general" in program
        for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
            assert word not in program


@pytest.mark.parametrize(("waiting", "tokens"), [(False, [3, 9]), (True, [3, 3])])
def test_a_dispatch_ends_with_a_row_when_a_request_waits_for_one(
    tiny: Loaded, waiting: bool, tokens: list[int]
) -> None:
    """Two rows of 8-step dispatches, the first one's budget is 3: the other goes on alone only if nobody waits."""
    pace = Steady(tiny.pair.proposer("plain", None))
    engine = Engine(Device(tiny.pair, pace.proposers, Capacity.whole(2, 2, 16), 8, choose_greedily), pace)
    runs = [engine.submit(Request(i, tuple(PROMPTS[i]), budget, ())) for i, budget in enumerate((3, 12))]
    engine.step()
    if waiting:
        engine.submit(Request(2, tuple(PROMPTS[2]), 4, ()))
    engine.step()
    assert [len(run.token_ids) for run in runs] == tokens


def test_invariants_hold_after_every_dispatch(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the debug mode finds a state that breaks them."""
    monkeypatch.setenv("TORCH_DFLASH_DEBUG", "1")
    finish(decoding(engine_with(tiny)))
    for broken in ("budget", "committed_len", "anchor", "history"):
        engine = decoding(engine_with(tiny))
        state = engine.device.state
        engine.device.state = replace(state, **{broken: getattr(state, broken) + 1})
        with pytest.raises(AssertionError):
            check_invariants(engine)


def poisoned(engine: Engine) -> DecodeState:
    """The engine's state with POISON wherever nothing has been committed or absorbed."""
    device, host = engine.device.state, jax.device_get(engine.device.state)
    pool = poisoned_pool(engine, host.pool, host.committed_len)
    draft_pool = poisoned_pool(engine, host.draft.pool, host.draft.draft_len)
    columns = np.arange(host.draft.context.features.shape[1]) < (host.committed_len - host.draft.draft_len)[:, None]
    features = np.where(columns[:, :, None], host.draft.context.features, POISON)
    draft = replace(host.draft, pool=draft_pool, context=replace(host.draft.context, features=features))
    state = replace(host, pool=pool, draft=draft)
    stored = jax.tree.map(lambda new, old: to_storage(jnp.array(new), old.dtype), state, device)
    return jax.device_put(stored, jax.devices()[0])


def poisoned_pool(engine: Engine, pool: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """POISON in every slot but those of the first lengths[r] positions of the running rows."""
    capacity = engine.capacity
    filled = np.zeros((capacity.num_pages, capacity.page_size), bool)
    for row, pages in enumerate(engine.pages.table()):
        for position in range(lengths[row] if engine.rows[row] else 0):
            filled[pages[position // capacity.page_size], position % capacity.page_size] = True
    layers = pool.shape[0] // capacity.num_pages
    return np.where(np.tile(filled, (layers, 1))[:, :, None, None], pool, POISON)


@pytest.mark.parametrize("again", [False, True], ids=["once", "before every dispatch"])
def test_padding_content_changes_nothing(again: bool, tiny: Loaded, clean: dict[int, tuple]) -> None:
    engine = engine_with(tiny)
    runs: dict[int, Run] = {}
    while not engine.idle:
        if again or len(runs) == 1:
            engine.device.state = poisoned(engine)
        runs |= {run.request.index: run for run in engine.step()}
    assert {index: (run.token_ids, run.trace) for index, run in runs.items()} == clean
