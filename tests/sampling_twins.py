"""Slow twins of torch_dflash/sampling.py: Hugging Face's processors, NumPy loops, and the generator from its paper."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torch_dflash import reference
from torch_dflash.models.target import Target
from torch_dflash.options import Sampling


def filtered(s: Sampling, logits: np.ndarray) -> np.ndarray:
    """[T,V] over the temperature, with -inf for what is excluded. Of tokens equally likely Hugging Face's top-p keeps
    any; all are meant."""
    everything = torch.tensor(logits)
    if s.temperature > 0:
        everything = TemperatureLogitsWarper(float(s.temperature))(None, everything)
    left = everything if s.top_k is None else TopKLogitsWarper(s.top_k)(None, everything)
    for apply in (TopPLogitsWarper(s.top_p), MinPLogitsWarper(s.min_p)):
        left = apply(None, left)
    lowest = torch.where(left.isinf(), torch.inf, left).amin(-1, keepdim=True)
    return torch.where(everything >= lowest, everything, -torch.inf).numpy()


def adjusted(s: Sampling, logits: np.ndarray, known: Sequence[int], prompt_len: int) -> np.ndarray:
    """[V] of one position, behind the tokens `known`."""
    logits = logits.copy()
    for token, value in s.logit_bias.items():
        logits[token] += np.float32(value)
    if s.repetition_penalty != 1:
        penalise = RepetitionPenaltyLogitsProcessor(float(s.repetition_penalty))
        logits = penalise(torch.tensor([list(known)]), torch.tensor(logits)[None])[0].numpy()
    for token, times in Counter(known[prompt_len:]).items():
        logits[token] -= np.float32(s.frequency_penalty) * times + np.float32(s.presence_penalty)
    return logits


def threefry(key: Sequence[int], x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    """The first word of Threefry-2x32 with 20 rounds, from its paper (Salmon et al. 2011). uint64 holds the carries."""
    word, keys = 2**32 - 1, (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x0, x1 = (x0 + keys[0]) & word, (x1 + keys[1]) & word
    for group in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = (x0 + x1) & word
            x1 = ((x1 << by | x1 >> (32 - by)) & word) ^ x0
        x0, x1 = (x0 + keys[(group + 1) % 3]) & word, (x1 + keys[(group + 2) % 3] + group + 1) & word
    return x0


def gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """[V]: the noise of one position, in f64."""
    at = np.full(vocab_size, position, np.uint64), np.arange(vocab_size, dtype=np.uint64)
    uniform = (threefry((seed % 2**32, seed >> 32), *at) + 0.5) / 2**32
    return -np.log(-np.log1p(-np.minimum(uniform, 1 - 2.0**-24)))


def choice(s: Sampling, logits: np.ndarray, known: Sequence[int], prompt_len: int) -> int:
    """The token behind `known`, whose logits [V] these are."""
    logits = adjusted(s, logits, known, prompt_len)
    if s.temperature == 0:
        return int(logits.argmax())
    assert s.seed is not None
    return int((filtered(s, logits[None])[0] + gumbel(s.seed, len(known), len(logits))).argmax())


def text(target: Target, s: Sampling, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The new tokens, each from a pass over everything before it: no cache, no drafts, no JAX."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(choice(s, reference.target_pass(target, ids)[0][-1].numpy(), ids, len(prompt)))
    return ids[len(prompt) :]
