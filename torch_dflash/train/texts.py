"""From prompts to training texts: the target's answers, from the engine or in bulk, cut and turned into arrays."""

import random
import time
from collections.abc import Iterator, Sequence
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
from torch_dflash.train.invent import invent_prompts
from torch_dflash.train.recipe import Recipe
from torch_dflash.train.records import Answer, append_answers, read_answers, usable_length

SAMPLED_OPENING = (4, 64)  # tokens drawn before a text turns greedy
WHOLLY_SAMPLED = 0.2  # share of the later rounds' answers that are drawn at temperature 1 to the end


def make_answers(pair: Pair, groups: Sequence[Sequence[str]], recipe: Recipe, folder: Path) -> list[Answer]:
    """Answers to groups (files) of prompts: those of `folder`/answers.jsonl, made if they are not there."""
    path = folder / "answers.jsonl"
    if not recipe.accelerator:
        write_answers(pair, list(chain(*groups)), path, recipe.answers)
        return read_answers(path)
    if (folder / "answers.done").exists():
        return read_answers(path)
    path.unlink(missing_ok=True)
    for answers in _bulk(pair, groups, recipe):
        append_answers(path, answers)
    (folder / "answers.done").touch()
    return read_answers(path)


def _bulk(pair: Pair, groups: Sequence[Sequence[str]], recipe: Recipe) -> Iterator[list[Answer]]:
    """Round 0 answers every prompt greedily, invented ones too; later rounds vary the openings until time is up."""
    begin, params, own = time.perf_counter(), pair.params["target"], recipe.answers
    if recipe.invented and not getattr(pair.tokenizer, "chat_template", None):
        raise InputError("--invent needs a target with a chat template: this one never learnt to write prompts")
    stop_ids = eos_ids(pair.tokenizer, pair.target.config.eos_token_ids)
    plan = BulkPlan(own.rows, own.max_prompt_tokens, own.max_new_tokens)
    seed = own.seed
    batches = invent_prompts(pair.target, params, pair.tokenizer, groups, recipe.invented, plan, stop_ids, seed)
    every = [*chain(*groups), *chain(*batches)]
    ids = encode_prompts(pair, every, own)
    tokens = 0
    for number in range(recipe.rounds):
        openings = round_of_openings(ids, number, own)
        for answers in bulk_answers(pair.target, params, openings, plan, stop_ids, seed + 1 + number):
            yield answers
            tokens += sum(len(answer.token_ids) for answer in answers)
            if tokens > recipe.answer_tokens or time.perf_counter() - begin > recipe.answer_seconds:
                return


def round_of_openings(ids: dict[int, tuple[int, ...]], number: int, plan: AnswerPlan) -> list[Opening]:
    """One opening for each prompt: greedy in round 0, varied later."""
    rng = random.Random(f"{plan.seed} {number}")

    def sampled() -> int:
        if number == 0:
            return 0
        return plan.max_new_tokens if rng.random() < WHOLLY_SAMPLED else rng.randint(*SAMPLED_OPENING)

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
