"""The target's own answers to prompts, written by this project's engine: greedy and drawn ones mixed.

`bulk.py` does the same for hundreds at a time.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from torch_dflash.engine import Engine
from torch_dflash.errors import InputError
from torch_dflash.options import GREEDY, Sampling
from torch_dflash.pace import Steady
from torch_dflash.pair import Pair
from torch_dflash.propose import Plain
from torch_dflash.requests import Request
from torch_dflash.service import engine_for
from torch_dflash.tokenizer import as_chat, encode_prompt, eos_ids
from torch_dflash.train.records import Answer, append_answers, mend, read_answers

STEPS_PER_DISPATCH = 8


@dataclass(frozen=True)
class AnswerPlan:
    """How answers are made. `limit` None answers every prompt; longer prompts than max_prompt_tokens are left out.

    sampled: share of the prompts whose answer is drawn at temperature 1, with a seed of its own; the others are
    answered greedily. later_sampled: in bulk, the same share of the answers after each prompt's first; the others begin
    so and go on greedily.
    """

    rows: int = 32
    max_new_tokens: int = 256
    max_prompt_tokens: int = 256
    seed: int = 0
    limit: int | None = None
    sampled: float = 0.0
    later_sampled: float = 0.2

    def sampling(self, index: int) -> Sampling:
        """How the tokens of the answer to prompt `index` are chosen."""
        drawn = random.Random(f"{self.seed} {index}").random() < self.sampled
        return Sampling(temperature=1.0, seed=(self.seed << 32) + index) if drawn else GREEDY


def encode_prompts(pair: Pair, prompts: Sequence[str], plan: AnswerPlan) -> dict[int, tuple[int, ...]]:
    """Prompt index -> token ids, through the chat template where there is one; in the plan's shuffled order."""
    order = list(range(len(prompts)))
    random.Random(plan.seed).shuffle(order)
    ids = {index: tuple(prompt_ids(pair, prompts[index])) for index in order}
    short = {index: prompt for index, prompt in ids.items() if len(prompt) <= plan.max_prompt_tokens}
    return dict(list(short.items())[: plan.limit])


def prompt_ids(pair: Pair, text: str) -> list[int]:
    """A user's text as the target gets it: through the chat template where there is one; bytes without a tokenizer."""
    if pair.tokenizer is None:
        return list(text.encode())
    return encode_prompt(as_chat(text, pair.tokenizer), pair.tokenizer, pair.target.config.vocab_size)


def write_answers(pair: Pair, prompts: Sequence[str], path: Path, plan: AnswerPlan) -> None:
    """Answer the prompts that `path` does not hold yet, and append each answer when it is finished.

    May be killed at any moment: the next call goes on where this one stopped. Raises InputError when `path` was made
    from other prompts.
    """
    mend(path)
    wanted = encode_prompts(pair, prompts, plan)
    for answer in read_answers(path):
        if wanted.pop(answer.index, answer.prompt_ids) != answer.prompt_ids:
            raise InputError(f"{path}: answer {answer.index} belongs to another prompt; use a new folder")
    if wanted:
        _run(pair, wanted, path, plan)


def _run(pair: Pair, wanted: dict[int, tuple[int, ...]], path: Path, plan: AnswerPlan) -> None:
    begin, tokens = time.perf_counter(), 0
    with tqdm(total=len(wanted), desc="answers", unit="answer", mininterval=1) as bar:
        for finished in _finished(pair, wanted, plan):
            append_answers(path, finished)
            tokens += sum(len(answer.answer_ids) for answer in finished)
            bar.update(len(finished))
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - begin):.0f} tokens/s", refresh=False)


def _finished(pair: Pair, wanted: dict[int, tuple[int, ...]], plan: AnswerPlan) -> Iterator[list[Answer]]:
    """Answers as they finish, one list for each dispatch."""
    stop_ids = eos_ids(pair.tokenizer, pair.target.config.eos_token_ids)
    requests = [
        Request(index, ids, plan.max_new_tokens, stop_ids, plan.sampling(index)) for index, ids in wanted.items()
    ]
    engine = _engine(pair, requests, plan.rows)
    while not engine.idle:
        runs = {run.request.index: run for run in engine.step() if run.finish_reason is not None}
        yield [Answer(run.request.index, run.request.prompt_ids, tuple(run.token_ids)) for run in runs.values()]


def _engine(pair: Pair, requests: list[Request], rows: int) -> Engine:
    engine = engine_for(pair, Steady(Plain()), requests, rows, STEPS_PER_DISPATCH)
    for request in requests:
        engine.submit(request)
    engine.warm_up()
    return engine
