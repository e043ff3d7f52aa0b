"""Round by round against the original DFlash: data recorded from it, see the README beside the golden data."""

from typing import Any

import pytest
from helpers import golden, golden_data, golden_pair

from torch_dflash import Result, generate, load_pair

# Name of the pair, recorded trace, change to the drafter's config.json under which that trace arises.
TRACES = {
    "qwen3-gqa": ("qwen3-gqa", "golden", "{}"),
    "qwen3-untied": ("qwen3-untied", "golden", "{}"),
    "llama3-rope": ("llama3-rope", "golden", "{}"),
    "trained-bytes": ("trained-bytes", "golden", "{}"),
    "swa, no window": ("qwen3-swa", "golden", '{"layer_types": null, "use_sliding_window": false}'),
    "swa, window": ("qwen3-swa", "golden_fa2window", '{"is_causal": false}'),
    "swa, causal window": ("qwen3-swa", "golden_causalwindow", "{}"),
}
SMALLER = [("qwen3-gqa", 5), ("trained-bytes", 9), ("llama3-rope", 6)]


def rounds_of(result: Result) -> list[tuple]:
    assert result.trace is not None
    return [(entry.start, entry.proposed, entry.accepted) for entry in result.trace]


def expected_rounds(prompt: dict[str, Any]) -> list[tuple]:
    """The original's steps. Its last one may run behind the budget, which ours never does."""
    end = len(prompt["prompt_ids"]) + prompt["max_new_tokens"] - 1
    steps = [step for step in prompt["steps"] if step["start"] < end]
    assert len(prompt["steps"]) - len(steps) <= 1
    return [(step["start"], step["draft_tokens"], step["accepted"]) for step in steps]


def check(prompt: dict[str, Any], result: Result) -> None:
    length = len(prompt["prompt_ids"])
    assert rounds_of(result) == expected_rounds(prompt)
    assert result.token_ids == prompt["output_ids"][length:] == prompt["ar_output_ids"][length:]
    emitted = [token for entry in result.trace or () for token in entry.emitted]
    assert [prompt["first_token"], *emitted] == result.token_ids
    for entry, step in zip(result.trace or (), prompt["steps"], strict=False):
        assert entry.emitted == [*step["draft_tokens"][: step["accepted"]], step["emitted"]][: len(entry.emitted)]


@pytest.mark.parametrize("case", TRACES)
def test_rounds_of_a_batch_equal_the_originals(case: str) -> None:
    """Rows of 1 to 100 tokens together; the original ran them one by one."""
    name, variant, changes = TRACES[case]
    pair, data = golden_pair(name, changes), golden_data(name, variant)
    budgets = {prompt["max_new_tokens"] for prompt in data["prompts"]}
    prompts = [prompt["prompt_ids"] for prompt in data["prompts"]]
    results = generate(pair, prompts, max(budgets), trace=True, ignore_eos=True)
    assert len(budgets) == 1
    for prompt, result in zip(data["prompts"], results, strict=True):
        check(prompt, result)
    kept = sum(len(entry.emitted) for result in results for entry in result.trace or ())
    assert kept / sum(result.stats.steps for result in results) > 2  # these drafters are right often


def test_rounds_of_a_prompt_alone_equal_the_originals() -> None:
    prompt = golden_data("qwen3-gqa")["prompts"][1]
    pair = golden_pair("qwen3-gqa")
    check(prompt, generate(pair, prompt["prompt_ids"], prompt["max_new_tokens"], trace=True, ignore_eos=True)[0])


def budget_and_stop_runs(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in data["extra_runs"]["runs"] if not run["args"].keys() - {"max_new_tokens", "stop_token_ids"}]


def test_budgets_and_stops_of_the_original() -> None:
    """Where the original runs a block too many or takes its unwritten tail for text, ours stops exactly."""
    pair, data = golden_pair("qwen3-gqa"), golden_data("qwen3-gqa")
    prompt = data["prompts"][data["extra_runs"]["prompt"]]
    length = len(prompt["prompt_ids"])
    full = prompt["ar_output_ids"][length:]
    for run in budget_and_stop_runs(data):
        budget, stops = run["args"]["max_new_tokens"], run["args"].get("stop_token_ids", [])
        result = generate(pair, prompt["prompt_ids"], budget, stops, ignore_eos=True)[0]
        at = next((i + 1 for i, token in enumerate(full) if token in stops), len(full))
        assert result.token_ids == full[: min(at, budget)]
        if data["mask_token_id"] not in stops:
            assert result.token_ids == run["output_ids"][length:]
        assert result.finish_reason == ("stop" if result.token_ids[-1] in stops else "length")
    assert len(budget_and_stop_runs(data)) == 7


@pytest.mark.parametrize(("name", "block_size"), SMALLER)
def test_smaller_blocks_accept_what_the_original_accepts(name: str, block_size: int) -> None:
    data = golden_data(name)
    run = next(r for r in data["extra_runs"]["runs"] if r["args"].get("block_size") == block_size)
    assert min(run["min_draft_gap"], run["min_target_gap"]) > 1e-3
    prompt = data["prompts"][data["extra_runs"]["prompt"]]["prompt_ids"]
    pair = load_pair(golden(name) / "target", golden(name) / "draft", block_size=block_size)
    result = generate(pair, prompt, run["args"]["max_new_tokens"], trace=True, ignore_eos=True)[0]
    assert result.token_ids == run["output_ids"][len(prompt) :]
    accepted = [entry.accepted + 1 for entry in result.trace or ()]
    assert accepted == run["acceptance_lengths"][: len(accepted)]
    assert len(run["acceptance_lengths"]) - len(accepted) <= 1
