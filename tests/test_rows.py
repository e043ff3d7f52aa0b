"""Rows of a batch: each equals its single run, whatever its neighbours, its row's past, or the dispatch size."""

import pytest
from helpers import Loaded, prompt_of, run_engine, write_target

from torch_dflash import InputError, Pair, generate, load_pair, reference
from torch_dflash.engine import Engine
from torch_dflash.requests import Request, Run
from torch_dflash.state import Capacity

# More prompts than rows; lengths, budgets and stop ids all differ, so rows finish at different times.
REQUESTS = [
    Request(i, tuple(prompt_of(length)), budget, stop_ids)
    for i, (length, budget, stop_ids) in enumerate(
        [
            *[(1, 20, ()), (16, 9, ()), (7, 1, ()), (12, 14, (5,)), (3, 2, ()), (9, 20, (2, 8))],
            *[(2, 11, ()), (15, 4, ()), (5, 17, (0,)), (11, 6, ()), (4, 13, ())],
        ]
    )
]
Answer = tuple[list[int], list, str | None]


def answers(runs: list[Run]) -> list[Answer]:
    return [(run.token_ids, run.trace, run.finish_reason) for run in runs]


@pytest.fixture(scope="module")
def single(tiny: Loaded) -> list[Answer]:
    """Every request alone in a fresh engine."""
    proposer = tiny.pair.proposer("dflash", None)
    return [answers(run_engine(tiny.pair, proposer, [r], Capacity.whole(1, 1, 64)))[0] for r in REQUESTS]


def test_single_runs_equal_the_reference(tiny: Loaded, single: list[Answer]) -> None:
    for request, (token_ids, trace, _) in zip(REQUESTS, single, strict=True):
        ids, rounds = reference.dflash(
            tiny.target, tiny.drafter, tiny.config, request.prompt_ids, request.max_new_tokens
        )
        assert token_ids == list(ids[: len(token_ids)])
        starts = {entry.start: entry for entry in rounds}
        assert all(entry.proposed == starts[entry.start].proposed for entry in trace)


def test_a_batch_equals_single_runs(tiny: Loaded, single: list[Answer]) -> None:
    batch = run_engine(tiny.pair, tiny.pair.proposer("dflash", None), REQUESTS, Capacity.whole(8, 1, 64, finer_by=8))
    assert answers(batch) == single


def test_a_reused_row_equals_a_fresh_one(tiny: Loaded, single: list[Answer]) -> None:
    one_row = run_engine(tiny.pair, tiny.pair.proposer("dflash", None), REQUESTS, Capacity.whole(1, 1, 64))
    assert answers(one_row) == single


@pytest.mark.parametrize("max_steps", [1, 3, 8])
def test_steps_per_dispatch_change_nothing(max_steps: int, tiny: Loaded, single: list[Answer]) -> None:
    runs = run_engine(
        tiny.pair, tiny.pair.proposer("dflash", None), REQUESTS, Capacity.whole(8, 1, 64, finer_by=8), max_steps
    )
    assert answers(runs) == single


def test_order_of_pages_changes_nothing(tiny: Loaded) -> None:
    """Small pages, taken and given back by others first: tables end up shuffled, blocks cross page borders."""
    requests = [
        Request(i, tuple(prompt_of(n)), budget, ()) for i, (n, budget) in enumerate([(14, 3), (3, 9), (13, 18)])
    ]
    proposer = tiny.pair.proposer("dflash", None)
    tables: list[list[int]] = []

    def look(engine: Engine) -> None:
        engine.pages.check_integrity()
        tables.extend(row[row > 0].tolist() for row in engine.pages.table())

    batch = run_engine(tiny.pair, proposer, [*requests, *requests[::-1]], Capacity.whole(2, 16, 4), 2, look)
    for run in batch:
        ids, rounds = reference.dflash(
            tiny.target, tiny.drafter, tiny.config, run.request.prompt_ids, run.request.max_new_tokens
        )
        assert (run.token_ids, run.trace) == (ids, rounds)
    assert any(pages != sorted(pages) for pages in tables)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, tiny: Loaded) -> Pair:
    """The tiny pair with a context of 24 positions."""
    folder = write_target(tmp_path_factory.mktemp("short"), max_position_embeddings=24)
    return load_pair(folder, tiny.folder / "draft")


def test_the_edge_of_the_context_shortens(short: Pair, tiny: Loaded) -> None:
    prompts = [prompt_of(n) for n in (23, 20, 17)]
    results = generate(short, prompts, 100, ignore_eos=True, trace=True)
    for prompt, result in zip(prompts, results, strict=True):
        room = 24 - len(prompt)
        expected = reference.dflash(tiny.target, tiny.drafter, tiny.config, prompt, room, context_limit=24)
        assert (result.token_ids, result.trace) == expected
        assert result.finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_refused(short: Pair) -> None:
    with pytest.raises(InputError, match=r"24 tokens.*context 24"):
        generate(short, prompt_of(24), 1)
