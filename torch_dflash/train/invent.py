"""More prompts than the files hold: the target itself goes on from the opening words of real ones, at temperature 1.

Greedy answers are the best training data, and a prompt has only one. The target was tuned on whole chats, so it also
writes the user's side.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from bridge.views import Params
from torch_dflash.train.bulk import BulkPlan, Opening, bulk_answers
from torch_dflash.train.records import Answer
from torch_dflash.verify import TargetFunctions

SHORTEST = 4  # tokens that the target must add
_CODE_OPENINGS = (
    "Complete this Python function:\n```python\ndef {name}(",
    "Implement the function below.\n```python\nfrom typing import List\n\n\ndef {name}(",
    "Write the body of the following function and test it:\n```python\ndef {name}(",
)
_CODE_END = '"""'


def openings(groups: Sequence[Sequence[str]], count: int, seed: int) -> list[str]:
    """Beginnings of prompts, of each group (file) equally many: up to half the words, or, for a fifth of them, the
    beginning of a Python function named after some words."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        words = rng.choice(rng.choice(groups)).split(" ")
        if rng.random() < 0.2:
            name = "_".join(word.lower() for word in rng.sample(words, min(len(words), 3)) if word.isalpha()) or "solve"
            made.append(rng.choice(_CODE_OPENINGS).format(name=name))
        else:
            made.append(" ".join(words[: rng.randint(1, max(1, len(words) // 2))]))
    return made


def finished(opening: str, added: str) -> str | None:
    """The whole prompt, or None when it is no use. A function's signature ends behind its docstring."""
    text = opening + added
    if "```python" not in opening:
        return text.strip()
    parts = text.split(_CODE_END)
    return _CODE_END.join(parts[:2]) + _CODE_END + "\n```" if len(parts) > 2 else None


def invent_prompts(
    target: TargetFunctions,
    params: Params,
    tokenizer: Any,
    groups: Sequence[Sequence[str]],
    count: int,
    plan: BulkPlan,
    stop_ids: tuple[int, ...],
    seed: int,
    done: int = 0,
) -> Iterator[list[str]]:
    """New prompts, one list for each batch without the first `done`; fewer than `count` in all, since useless ones are
    left out."""
    texts = openings(groups, count, seed)
    started = [Opening(i, _user_turn(tokenizer, text), plan.max_new_tokens) for i, text in enumerate(texts)]
    started = [opening for opening in started if len(opening.prompt_ids) <= plan.prompt_width]
    for answers in bulk_answers(target, params, started, plan, stop_ids, seed, done):
        made = [_finished(tokenizer, texts[answer.index], answer, stop_ids) for answer in answers]
        yield [text for text in made if text]


def _user_turn(tokenizer: Any, text: str) -> tuple[int, ...]:
    """A chat whose user has not finished yet."""
    mark = "\x00"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return tuple(tokenizer(chat.partition(mark)[0] + text, add_special_tokens=False)["input_ids"])


def _finished(tokenizer: Any, opening: str, answer: Answer, stop_ids: tuple[int, ...]) -> str | None:
    ids = answer.answer_ids
    if ids[-1] not in stop_ids or len(ids) < SHORTEST:
        return None
    return finished(opening, tokenizer.decode(ids, skip_special_tokens=True))
