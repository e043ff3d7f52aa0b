"""The Python API: what it takes, what it gives, and one line for everything it refuses."""

from pathlib import Path
from typing import Any

import pytest
from helpers import Loaded, changed_draft, golden, golden_data, golden_pair, prompt_of, write_target

from torch_dflash import InputError, Pair, follow, generate, load_pair, metrics, reference, stream

NEW = 12


@pytest.fixture(scope="module")
def text_pair() -> Pair:
    return golden_pair("trained-bytes")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target without a drafter and without a tokenizer."""
    return load_pair(write_target(tmp_path_factory.mktemp("alone")), None)


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


BAD_ARGUMENTS = [
    ({"method": "beam"}, "method 'beam'", '"eagle3" or "plain"'),
    ({"num_drafts": 0}, "num_drafts is 0", "1..3"),
    ({"num_drafts": 4}, "num_drafts is 4", "1..3"),
    ({"num_drafts": True}, "num_drafts is True", "1..3"),
    ({"num_drafts": "2"}, "num_drafts is '2'", "1..3"),
    ({"num_drafts": 1.0}, "num_drafts is 1.0", "1..3"),
    ({"max_new_tokens": -1}, "max_new_tokens is -1", ">= 0"),
    ({"max_new_tokens": True}, "max_new_tokens is True", ">= 0"),
    ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0", ">= 0"),
    ({"steps_per_dispatch": 0}, "steps_per_dispatch is 0", ">= 1"),
    ({"steps_per_dispatch": "8"}, "steps_per_dispatch is '8'", ">= 1"),
    ({"stop_token_ids": [3, 12]}, "an id in stop_token_ids is 12", "0..11"),
    ({"stop_token_ids": [-1]}, "an id in stop_token_ids is -1", "0..11"),
    ({"stop_token_ids": ["a"]}, "an id in stop_token_ids is 'a'", "0..11"),
    ({"stop_token_ids": [True]}, "an id in stop_token_ids is True", "0..11"),
]


@pytest.mark.parametrize(("arguments", "field", "remedy"), BAD_ARGUMENTS, ids=lambda value: str(value))
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], field: str, remedy: str, tiny: Loaded) -> None:
    for call in (generate, follow):
        message = refusal(call, tiny.pair, [1, 2], **arguments)
        assert field in message
        assert remedy in message


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([], "prompts is empty"),
        ([[]], "prompt is empty"),
        ([[1], []], "prompt is empty"),
        ([[1, 12]], "prompt id 12 at position 1"),
        ([[-1]], "prompt id -1 at position 0"),
        ([[1.5]], "prompt id 1.5 at position 0"),
        ([[True]], "prompt id True at position 0"),
        (["text"], "no tokenizer"),
        ([[{"role": "user", "content": "hi"}]], "no tokenizer"),
        ([[1] * 512], "512 tokens"),
    ],
)
def test_bad_prompts_are_refused(prompts: Any, field: str, tiny: Loaded) -> None:
    assert field in refusal(generate, tiny.pair, prompts)


@pytest.mark.parametrize(
    ("prompts", "arguments", "field"),
    [
        (None, {}, "prompts"),
        (5, {}, "prompts"),
        ({"role": "user", "content": "hi"}, {}, "prompts"),
        (b"text", {}, "prompts"),
        ([1], {"stop_token_ids": 5}, "stop_token_ids"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(prompts: Any, arguments: Any, field: str, tiny: Loaded) -> None:
    assert field in refusal(generate, tiny.pair, prompts, **arguments)


@pytest.mark.parametrize("block_size", ["3", 3.0, True])
def test_a_block_size_is_an_integer(block_size: Any, tiny: Loaded) -> None:
    message = refusal(load_pair, tiny.folder / "target", tiny.folder / "draft", block_size=block_size)
    assert f"block_size is {block_size!r}" in message


def test_what_a_lone_target_cannot_do(alone: Pair) -> None:
    assert "needs a drafter" in refusal(generate, alone, [1], method="dflash")
    assert "needs a tokenizer" in refusal(stream, alone, [1])
    result = generate(alone, [1, 2], 3, ignore_eos=True)[0]
    assert result.text is None
    assert result.stats.steps == 2


def test_bad_pairs_are_refused(tiny: Loaded, tmp_path: Path) -> None:
    target, draft = tiny.folder / "target", tiny.folder / "draft"
    assert "dtype 'float16'" in refusal(load_pair, target, draft, dtype="float16")
    for block_size in (5, 1, 0):
        message = refusal(load_pair, target, draft, block_size=block_size)
        assert f"block_size is {block_size}" in message
        assert "2..4" in message
    other = refusal(load_pair, golden("qwen3-gqa") / "target", draft)
    assert "num_target_layers is 2" in other
    assert "another target" in other
    assert "mask_token_id" in refusal(load_pair, golden("qwen3-gqa") / "target", no_mask(tmp_path))


def no_mask(folder: Path) -> Path:
    return changed_draft("qwen3-gqa", {"dflash_config": {"target_layer_ids": [1, 3]}}, folder)


def test_the_forms_of_a_prompt(text_pair: Pair) -> None:
    """A text, its ids, a batch of either; a bare one is a batch of one."""
    text, ids = "def f(", list(b"def f(")
    answers = generate(text_pair, [text, ids, tuple(ids)], NEW)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    for bare in (text, ids):
        single = generate(text_pair, bare, NEW, steps_per_dispatch=1)
        assert [answer.token_ids for answer in single] == [answers[0].token_ids]
    assert answers[0].text == bytes(token for token in answers[0].token_ids if token < 256).decode()
    assert answers[0].trace is None


@pytest.mark.parametrize("method", ["dflash", "plain"])
def test_stream_pieces_join_to_the_text(method: str, text_pair: Pair) -> None:
    prompt = bytes(golden_data("trained-bytes")["prompts"][1]["prompt_ids"]).decode()
    result = generate(text_pair, prompt, 40, method=method, steps_per_dispatch=1)[0]
    pieces = list(stream(text_pair, prompt, 40, method=method))
    assert "".join(pieces) == result.text
    assert len(pieces) > 3
    assert all(pieces)


def test_follow_tells_drafts_from_the_targets_own_tokens(tiny: Loaded) -> None:
    moves = list(follow(tiny.pair, [4, 1, 2], NEW, ignore_eos=True))
    result = moves[-1].result
    assert result is not None
    assert [move.result for move in moves[:-1]] == [None] * (len(moves) - 1)
    assert [token for move in moves for token in move.token_ids] == result.token_ids
    expected = [False]
    for entry in result.trace or ():
        expected += [i < entry.accepted for i in range(len(entry.emitted))]
    assert [drafted for move in moves for drafted in move.drafted] == expected


def test_eos_and_stop_ids_end_a_text_together(tiny: Loaded) -> None:
    """The config's eos is 0. Whichever comes first ends the text and is its last token."""
    prompts = [prompt_of(n) for n in range(1, 9)]
    free = [reference.greedy(tiny.target, prompt, 24) for prompt in prompts]
    other = max(range(1, 12), key=lambda token: sum({token, 0} & {*ids} == {token} for ids in free))
    stopped = generate(tiny.pair, prompts, 24, [other])
    for full, result in zip(free, stopped, strict=True):
        at = next((i for i, token in enumerate(full) if token in (0, other)), None)
        assert result.token_ids == full[: None if at is None else at + 1]
        assert result.finish_reason == ("length" if at is None else "stop")
    assert {result.token_ids[-1] for result in stopped if result.finish_reason == "stop"} == {0, other}


def test_figures_of_a_result_agree(tiny: Loaded) -> None:
    for max_new_tokens in (0, 1, 2, NEW):
        results = generate(tiny.pair, [prompt_of(n) for n in (2, 5, 9)], max_new_tokens, trace=True, ignore_eos=True)
        for length, result in zip((2, 5, 9), results, strict=True):
            stats, trace = result.stats, result.trace or ()
            kept = sum(len(entry.emitted) for entry in trace)
            assert (
                (stats.prompt_tokens, stats.new_tokens) == (length, max_new_tokens) == (length, len(result.token_ids))
            )
            assert kept + 1 == max_new_tokens or (kept, max_new_tokens) == (0, 0)
            assert sum(stats.accept_histogram) == stats.steps == len(trace)
            assert len(stats.accept_histogram) == 4
            assert stats.tau == (kept / len(trace) if trace else 0)
            assert stats.ttft > 0 or max_new_tokens == 0
            assert (stats.tpot > 0) == (max_new_tokens > 1)
            assert dict(stats)["tau"] == stats["tau"] == stats.tau
            assert result.finish_reason == "length"
            with pytest.raises(KeyError):
                stats["keys"]


def test_metrics_by_example() -> None:
    assert metrics.tau(new_tokens=9, steps=2) == 4.0
    assert metrics.tau(new_tokens=1, steps=0) == 0.0
    assert metrics.tpot(first=1.0, last=3.0, new_tokens=5) == 0.5
    assert metrics.tpot(first=1.0, last=1.0, new_tokens=1) == 0.0
    assert metrics.accept_histogram([0, 3, 3, 1], num_drafts=3) == [1, 1, 0, 2]
    assert metrics.accept_histogram([], num_drafts=2) == [0, 0, 0]
    entry = metrics.TraceEntry(start=4, proposed=(1, 2), accepted=1, emitted=(1, 5))
    assert dict(entry) == {"start": 4, "proposed": (1, 2), "accepted": 1, "emitted": (1, 5)}
