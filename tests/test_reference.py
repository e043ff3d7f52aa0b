"""The cached, batched, jitted decoding against full recomputation in eager torch, round by round."""

import pytest
import torch
from helpers import Loaded, prompt_of

from torch_dflash import Result, generate, reference
from torch_dflash.config import DraftLayer

# Around the borders of pages (64), padded prefill widths (16, 32, 64 ...) and prefill chunks (256).
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257)
NEW = 12


@pytest.fixture(scope="module")
def results(tiny: Loaded) -> list[Result]:
    return generate(tiny.pair, [prompt_of(n) for n in LENGTHS], NEW, trace=True, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tiny: Loaded) -> list[tuple]:
    prompts = [prompt_of(n) for n in LENGTHS]
    return [reference.dflash(tiny.target, tiny.drafter, tiny.config, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("case", range(len(LENGTHS)), ids=map(str, LENGTHS))
def test_every_round_equals_full_recomputation(case: int, results: list[Result], expected: list[tuple]) -> None:
    token_ids, trace = expected[case]
    assert results[case].trace == trace
    assert results[case].token_ids == token_ids
    assert len(trace) >= 3


def test_the_cases_are_not_trivial(expected: list[tuple]) -> None:
    """Drafts were rejected at once, in the middle and not at all, and the texts are not one token over and over."""
    assert {entry.accepted for _, trace in expected for entry in trace} == {0, 1, 2, 3}
    assert all(len(set(token_ids)) >= 2 for token_ids, _ in expected)


def test_drafting_changes_no_token(tiny: Loaded, results: list[Result]) -> None:
    cases = [LENGTHS.index(n) for n in (1, 16, 257)]
    plain = generate(tiny.pair, [prompt_of(LENGTHS[i]) for i in cases], NEW, ignore_eos=True, method="plain")
    for case, result in zip(cases, plain, strict=True):
        assert result.token_ids == results[case].token_ids
        assert result.token_ids == reference.greedy(tiny.target, prompt_of(LENGTHS[case]), NEW)
        assert result.stats.steps == NEW - 1


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_fewer_drafts_than_the_block_has(num_drafts: int, tiny: Loaded) -> None:
    prompts = [prompt_of(n) for n in (3, 9)]
    results = generate(tiny.pair, prompts, NEW, num_drafts=num_drafts, trace=True, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        expected = reference.dflash(tiny.target, tiny.drafter, tiny.config, prompt, NEW, num_drafts)
        assert (result.token_ids, result.trace) == expected
        assert all(len(entry.proposed) == num_drafts for entry in result.trace)


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2])
def test_the_reference_keeps_budgets(max_new_tokens: int, tiny: Loaded) -> None:
    token_ids, trace = reference.dflash(tiny.target, tiny.drafter, tiny.config, [1, 2], max_new_tokens)
    assert token_ids == reference.greedy(tiny.target, [1, 2], 5)[:max_new_tokens]
    assert sum(len(entry.emitted) for entry in trace) == max(0, max_new_tokens - 1)


@pytest.mark.parametrize(
    ("drafts", "target", "expected"),
    [([5, 6, 9], [5, 6, 7, 8], 2), ([1, 6, 7], [5, 6, 7, 8], 0), ([5, 6, 7], [5, 6, 7, 8], 3), ([], [4], 0)],
)
def test_matching_prefix(drafts: list[int], target: list[int], expected: int) -> None:
    assert reference.matching_prefix(drafts, target) == expected


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (DraftLayer(causal=False, window=None), ["#####", "#####"]),
        (DraftLayer(causal=True, window=None), ["####.", "#####"]),
        (DraftLayer(causal=True, window=2), ["..##.", "...##"]),
        (DraftLayer(causal=False, window=2), ["..###", "...##"]),
    ],
)
def test_draft_visible(layer: DraftLayer, expected: list[str]) -> None:
    """Three context positions, a block of two at 3 and 4."""
    visible = reference.draft_visible(layer, torch.arange(3, 5), torch.arange(5))
    assert ["".join("#" if sees else "." for sees in row) for row in visible.tolist()] == expected
