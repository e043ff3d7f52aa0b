"""The short run: the target's own greedy answers to a few prompts, all written side by side.

Letters: R rows, T tokens, N keys, K key/value heads, d head_dim.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_dflash.config import TargetConfig
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.models.target import Target
from torch_dflash.reference import attention
from torch_dflash.tokenizer import Prompt, as_chat, encode_prompt, eos_ids

MAX_PROMPTS = 8
_QUESTIONS = (
    "List the planets of the solar system in order, with one fact about each.",
    "Write a Python function that returns the first n Fibonacci numbers, and explain it.",
    "Anna has 12 apples. She buys 3 bags of 8 apples and gives 10 away. How many are left? Think step by step.",
    "Explain to a child why the sky is blue.",
)
_BEGINNINGS = (  # for a target that continues text
    "import json\nimport os\n\n\ndef read_config(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def main():\n    parser = argparse.ArgumentParser(",
    "def fibonacci(n):\n",
)
_RANDOM_PROMPTS, _RANDOM_LENGTH = 4, 16


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy answer. Positions prompt_length.. are the target's own tokens."""

    token_ids: tuple[int, ...]
    prompt_length: int


def builtin_prompts(config: TargetConfig, tokenizer: Any) -> list[Prompt]:
    """Questions for a chat model, beginnings for another, random ids where there is no tokenizer."""
    if tokenizer is None:
        source = random.Random(0)
        return [[source.randrange(config.vocab_size) for _ in range(_RANDOM_LENGTH)] for _ in range(_RANDOM_PROMPTS)]
    return [as_chat(text, tokenizer) for text in (_QUESTIONS if tokenizer.chat_template else _BEGINNINGS)]


def write_texts(
    target: Target, config: TargetConfig, tokenizer: Any, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[Text]:
    """Greedy answers, each ended by the model's end of text, the budget or the context limit. Raises InputError."""
    budget = checked_integer(max_new_tokens, "max_new_tokens", 1)
    encoded = [encode_prompt(prompt, tokenizer, config.vocab_size) for prompt in prompts[:MAX_PROMPTS]]
    longest = max(map(len, encoded))
    if longest >= config.context_limit:
        raise InputError(f"a prompt has {longest} tokens and the target's context {config.context_limit}: shorten it")
    answers = greedy_rows(target, config, encoded, min(budget, config.context_limit - longest))
    stop_ids = set(eos_ids(tokenizer, config.eos_token_ids))
    return [
        Text((*prompt, *_until_stop(answer, stop_ids)), len(prompt))
        for prompt, answer in zip(encoded, answers, strict=True)
    ]


def _until_stop(answer: list[int], stop_ids: set[int]) -> list[int]:
    """Up to and including the first stop id."""
    return answer[: next((i + 1 for i, token in enumerate(answer) if token in stop_ids), len(answer))]


@torch.inference_mode()
def greedy_rows(
    target: Target, config: TargetConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """`max_new_tokens` greedy tokens for each prompt, whatever they are.

    The prompts are padded on the right. A row writes at its own positions, so padding is overwritten before any query
    could see it.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows, width = len(prompts), int(lengths.max())
    cache = _Cache.empty(config, rows, width + max_new_tokens, target.norm.weight.dtype)
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], dtype=torch.int32)
    hidden, _, _ = target(ids, torch.arange(width).expand(rows, -1), (), cache.attend, torch.arange(width))
    token = target.logits(hidden[torch.arange(rows), lengths - 1]).argmax(-1)
    written = [token]
    for step in range(max_new_tokens - 1):
        at = (lengths + step)[:, None]
        hidden, _, _ = target(token[:, None].int(), at, (), cache.attend, at)
        token = target.logits(hidden[:, -1]).argmax(-1)
        written.append(token)
    return torch.stack(written, 1).tolist()


@dataclass(frozen=True)
class _Cache:
    """Keys and values of all layers, each [L,R,N,K,d], at their positions."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def empty(config: TargetConfig, rows: int, length: int, dtype: torch.dtype) -> "_Cache":
        shape = (config.num_layers, rows, length, config.block.num_kv_heads, config.block.head_dim)
        return _Cache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [R,T,K,d] at positions [R,T] or [T] and attend causally. The positions are handed on."""
        rows = torch.arange(q.shape[0])[:, None]
        self.keys[layer, rows, positions] = k
        self.values[layer, rows, positions] = v
        visible = positions[..., None] >= torch.arange(self.keys.shape[2])  # [R,T,N] or [T,N]
        visible = visible if visible.ndim == 2 else visible[:, None]
        return attention(q, self.keys[layer], self.values[layer], visible), positions
