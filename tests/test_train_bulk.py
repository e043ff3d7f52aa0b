"""Answers and prompts in bulk: what is drawn, and that a killed run goes on with the same texts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden_pair

from torch_dflash.errors import InputError
from torch_dflash.train.answers import AnswerPlan
from torch_dflash.train.bulk import GROUP, BulkPlan, Opening, bulk_answers, draw
from torch_dflash.train.recipe import Recipe
from torch_dflash.train.texts import make_answers, round_of_openings, whole_batches

GROUPS = [["def get_name(", "def add(a, b", "import ", "class Reader("], ["return", "for x in", "if not "]]


class ByteChat:
    """A tokenizer with a chat template: a turn is between < and >, each byte an id."""

    chat_template = "<>"
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    eos_token_id = None

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, **_: Any) -> Any:
        text = "".join(f"<{message['content']}>" for message in messages)
        return self(text)["input_ids"] if tokenize else text

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(i for i in ids if i < 128).decode()


@pytest.mark.parametrize("size", [7, GROUP, 3 * GROUP + 5])
def test_what_is_drawn_has_the_probabilities_of_the_softmax(size: int):
    """An id of probability 0 is never drawn, ids of all groups are, and each as often as it should be."""
    logits = np.random.default_rng(size).normal(size=size).astype(np.float32)
    logits[::3] = -np.inf
    logits[[1, -1 - (size % 3 == 1)]] = logits.max() + 1
    share = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    rows = 40_000
    ids = jax.jit(lambda key: draw(key, jnp.broadcast_to(jnp.asarray(logits), (rows, size))))(jax.random.key(0))
    counts = np.bincount(np.asarray(ids), minlength=size)
    assert counts.shape == (size,) and counts[::3].sum() == 0
    drawn, expected = counts[share > 0], rows * share[share > 0]
    chi = ((drawn - expected) ** 2 / expected).sum()
    assert abs(chi - len(expected) + 1) < 5 * np.sqrt(2 * len(expected))


def test_rows_are_drawn_from_their_own_logits():
    wanted = np.array([0, GROUP - 1, GROUP, 2 * GROUP, 2 * GROUP + 8])
    logits = np.where(np.arange(2 * GROUP + 9) == wanted[:, None], 0.0, -200.0)
    for seed in range(5):
        assert np.asarray(draw(jax.random.key(seed), jnp.asarray(logits, jnp.float32))).tolist() == wanted.tolist()


def test_the_first_batches_can_be_left_out():
    pair = golden_pair("trained-bytes")
    some = [Opening(i, tuple(f"def f{i}(".encode()), 6 * (i % 2)) for i in range(7)]
    arguments = pair.target, pair.params["target"], some, BulkPlan(2, 16, 6), (256,), 0
    every = list(bulk_answers(*arguments))
    assert [len(batch) for batch in every] == [2, 2, 2, 1]
    assert list(bulk_answers(*arguments, 1)) == every[1:]
    assert list(bulk_answers(*arguments, 4)) == []


def test_batches_of_rounds():
    assert whole_batches(0, 5, 2) == (0, 0)
    assert whole_batches(5, 5, 2) == (3, 5)  # the last batch of a round is smaller
    assert whole_batches(13, 5, 2) == (7, 12)


def recipe_for(folder: Path, **changes: Any) -> Recipe:
    folder.mkdir(exist_ok=True)
    plan = AnswerPlan(rows=2, max_new_tokens=24, max_prompt_tokens=64, seed=3, later_sampled=0.5)
    return replace(Recipe(answers=plan, bulk=True, rounds=2, invented=7), **changes)


def test_a_killed_run_ends_with_the_texts_of_one_that_nobody_disturbed(tmp_path: Path):
    """Cut in the middle of a line, of a batch, of a round, and while prompts were invented."""
    pair = replace(golden_pair("trained-bytes"), tokenizer=ByteChat())
    whole = tmp_path / "whole"
    wanted = make_answers(pair, GROUPS, recipe_for(whole), whole)
    answers, invented = ((whole / name).read_text() for name in ("answers.jsonl", "invented.jsonl"))
    own = sum(len(json.loads(line)) for line in invented.splitlines())
    assert own > 0 and len(wanted) == 2 * (7 + own)
    assert {a.num_sampled > 0 for a in wanted[: 7 + own]} == {False}
    lines, batches = answers.splitlines(keepends=True), invented.splitlines(keepends=True)
    cuts = [(len(lines) - 3, 0.5, batches), (1, 0, batches), (7 + own + 1, 0, batches), (0, 0, batches[:2])]
    for number, (kept, part, held) in enumerate(cuts):
        folder = tmp_path / str(number)
        recipe = recipe_for(folder)
        (folder / "invented.jsonl").write_text("".join(held) + '["half')
        (folder / "answers.jsonl").write_text("".join(lines[:kept]) + lines[kept][: int(part * len(lines[kept]))])
        assert make_answers(pair, GROUPS, recipe, folder) == wanted
        assert (folder / "answers.jsonl").read_text() == answers
        assert (folder / "invented.jsonl").read_text() == invented


def test_answers_end_when_there_are_enough_tokens(tmp_path: Path):
    pair = golden_pair("trained-bytes")
    recipe = recipe_for(tmp_path / "run", invented=0, answer_tokens=60.0)
    answers = make_answers(pair, GROUPS, recipe, tmp_path / "run")
    sizes = [len(answer.token_ids) for answer in answers]
    assert sum(sizes) > 60 >= sum(sizes[:-2])


def test_a_share_of_each_round_is_drawn_to_its_end():
    ids, plan = dict.fromkeys(range(1000), (1, 2)), AnswerPlan(max_new_tokens=100, sampled=0.25, later_sampled=0.75)
    first, later = ([o.num_sampled for o in round_of_openings(ids, number, plan)] for number in (0, 1))
    assert set(first) == {0, 100} and abs(first.count(100) - 250) < 60
    assert abs(later.count(100) - 750) < 60 and max(n for n in later if n < 100) <= 64 and 0 not in later


def test_answers_to_other_prompts_are_not_gone_on_from(tmp_path: Path):
    pair, folder = golden_pair("trained-bytes"), tmp_path / "run"
    make_answers(pair, GROUPS, recipe_for(folder, invented=0, answer_tokens=1.0), folder)
    (folder / "answers.done").unlink()
    with pytest.raises(InputError, match="belongs to another prompt; use a new folder"):
        make_answers(pair, [["other ", "prompts "]], recipe_for(folder, invented=0), folder)


def test_prompts_are_invented_by_targets_that_know_chats(tmp_path: Path):
    with pytest.raises(InputError, match="--invent needs a target with a chat template"):
        make_answers(golden_pair("trained-bytes"), GROUPS, recipe_for(tmp_path / "run"), tmp_path / "run")
