"""From prompts to training texts: the target's answers, from the engine or in bulk, cut and turned into arrays."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from torch_dflash.errors import InputError
from torch_dflash.pair import Pair
from torch_dflash.tokenizer import eos_ids
from torch_dflash.train.answers import AnswerPlan, encode_prompts, write_answers
from torch_dflash.train.batches import Data, make_data
from torch_dflash.train.bulk import BulkPlan, Opening, bulk_answers
from torch_dflash.train.checkpoint import write_atomically
from torch_dflash.train.invent import invent_prompts
from torch_dflash.train.recipe import Recipe
from torch_dflash.train.records import Answer, append_answers, mend, read_answers, usable_length

SAMPLED_OPENING = (4, 64)  # tokens drawn before a text turns greedy


def make_answers(pair: Pair, groups: Sequence[Sequence[str]], recipe: Recipe, folder: Path) -> list[Answer]:
    """Answers to groups (files) of prompts: those of `folder`/answers.jsonl, and those that are not there yet.

    May be killed at any moment: the next call goes on where this one stopped.
    """
    path = folder / "answers.jsonl"
    if not recipe.bulk:
        write_answers(pair, list(chain(*groups)), path, recipe.answers)
    elif not (folder / "answers.done").exists():
        _write_bulk(pair, groups, recipe, folder)
        (folder / "answers.done").touch()
    return read_answers(path)


def _write_bulk(pair: Pair, groups: Sequence[Sequence[str]], recipe: Recipe, folder: Path) -> None:
    """Round 0 answers every prompt, invented ones too; later rounds vary the openings until there are enough tokens."""
    path, own = folder / "answers.jsonl", recipe.answers
    stop_ids = eos_ids(pair.tokenizer, pair.target.config.eos_token_ids)
    plan = BulkPlan(own.rows, own.max_prompt_tokens, own.max_new_tokens)
    ids = encode_prompts(pair, [*chain(*groups), *_invented(pair, groups, recipe, plan, stop_ids, folder)], own)
    done, tokens = _taken_up(path, ids, plan.rows)
    per_round = -(-len(ids) // plan.rows)
    for number in range(recipe.rounds):
        openings, skip = round_of_openings(ids, number, own), min(max(0, done - number * per_round), per_round)
        seed = own.seed + 1 + number
        batches = bulk_answers(pair.target, pair.params["target"], openings, plan, stop_ids, seed, skip)
        while tokens <= recipe.answer_tokens and (answers := next(batches, None)) is not None:
            append_answers(path, answers)
            tokens += sum(len(answer.token_ids) for answer in answers)


def _taken_up(path: Path, ids: dict[int, tuple[int, ...]], rows: int) -> tuple[int, int]:
    """How many whole batches the file holds, and their tokens; the rest of it is cut off. Raises InputError when it was
    made from other prompts."""
    mend(path)
    held = read_answers(path)
    for answer in held:
        if ids.get(answer.index) != answer.prompt_ids:
            raise InputError(f"{path}: answer {answer.index} belongs to another prompt; use a new folder")
    if not held:
        return 0, 0
    done, whole = whole_batches(len(held), len(ids), rows)
    if whole < len(held):
        write_atomically(path, "".join(answer.line for answer in held[:whole]).encode())
    return done, sum(len(answer.token_ids) for answer in held[:whole])


def whole_batches(answers: int, of_a_round: int, rows: int) -> tuple[int, int]:
    """How many whole batches so many answers are, and how many answers those hold; each round's last batch is what is
    left of it.  Example: 13 answers, rounds of 5 in batches of 2 -> (7, 12)."""
    rounds, rest = divmod(answers, of_a_round)
    batches, whole = rounds * -(-of_a_round // rows) + rest // rows, rounds * of_a_round + rest // rows * rows
    return batches, whole


def _invented(
    pair: Pair,
    groups: Sequence[Sequence[str]],
    recipe: Recipe,
    plan: BulkPlan,
    stop_ids: tuple[int, ...],
    folder: Path,
) -> list[str]:
    """Prompts of the target's own: those of `folder`/invented.jsonl, a line for each batch, and those that are not
    there yet."""
    if not recipe.invented:
        return []
    if not getattr(pair.tokenizer, "chat_template", None):
        raise InputError("--invent needs a target with a chat template: this one never learnt to write prompts")
    path, seed = folder / "invented.jsonl", recipe.answers.seed
    mend(path)
    done = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
    params = pair.params["target"]
    for prompts in invent_prompts(
        pair.target, params, pair.tokenizer, groups, recipe.invented, plan, stop_ids, seed, done
    ):
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(prompts) + "\n")
    return [prompt for line in path.read_text(encoding="utf-8").splitlines() for prompt in json.loads(line)]


def round_of_openings(ids: dict[int, tuple[int, ...]], number: int, plan: AnswerPlan) -> list[Opening]:
    """One opening for each prompt: greedy in round 0, varied later; a share is drawn to the end."""
    rng = random.Random(f"{plan.seed} {number}")

    def sampled() -> int:
        if number == 0:
            return plan.max_new_tokens if rng.random() < plan.sampled else 0
        return plan.max_new_tokens if rng.random() < plan.later_sampled else rng.randint(*SAMPLED_OPENING)

    return [Opening(index, prompt, sampled()) for index, prompt in ids.items()]


def prepare(answers: Sequence[Answer], max_tokens: int) -> Data:
    """Answers without their endless repetitions, as arrays."""
    cut = [replace(a, answer_ids=a.answer_ids[: usable_length(a.answer_ids)]) for a in answers]
    return make_data(cut, max_tokens)


def free_mask_id(pair: Pair, data: Data) -> int:
    """The last special token that occurs in no text. Raises InputError where there is none."""
    special = set() if pair.tokenizer is None else set(pair.tokenizer.added_tokens_decoder)
    used = set(np.unique(data.token_ids).tolist()) | set(eos_ids(pair.tokenizer, pair.target.config.eos_token_ids))
    free = sorted(i for i in special - used if i < pair.target.config.vocab_size)
    if not free:
        raise InputError("the target has no special token that its texts never contain: give --mask-token-id")
    return free[-1]


def label_vocabulary(data: Data) -> np.ndarray:
    """int32, ascending: every id that occurs in the texts."""
    inside = np.arange(data.token_ids.shape[1]) < data.lengths[:, None]
    return np.unique(data.token_ids[inside]).astype(np.int32)


def frequent_ids(data: Data, count: int) -> np.ndarray:
    """int32, ascending: the `count` ids that the answers hold most often; fewer where they hold no more."""
    at = np.arange(data.token_ids.shape[1])
    answers = (at >= data.first_anchor[:, None]) & (at < data.lengths[:, None])
    ids, counts = np.unique(data.token_ids[answers], return_counts=True)
    return np.sort(ids[np.argsort(-counts, kind="stable")[:count]]).astype(np.int32)
