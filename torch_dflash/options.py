"""What a request may ask for beyond its prompt: how tokens are chosen. Checked here, sent to the device as arrays.

Letters: R rows, n stop ids, m biased ids.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from torch_dflash.errors import InputError, checked_integer
from torch_dflash.sampling import RowOptions

NO_STOP = -1
NO_ID = 2**31 - 1
MOST_BIASED = 1024


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen. The default is greedy.

    temperature: 0 is greedy. top_k (None: off), top_p (1: off), min_p (0: off): applied in this order, after the
    temperature. seed: 0..2**64-1; the same seed gives the same text, with or without drafts, whatever runs beside it,
    up to rounding, which may differ between batches of other shapes; None draws a new one for each request.
    repetition_penalty (1: off) counts prompt and answer, presence_penalty and frequency_penalty (0: off) the answer.
    logit_bias: token id -> what is added to its logit, at most 1024 ids.
    logprobs: give the log-probability of every token under the target's own distribution. Raises InputError.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, 1e6, "0 is greedy")
        _number("top_p", self.top_p, 0, 1, "1 switches it off", above=True)
        _number("min_p", self.min_p, 0, 1, "0 switches it off")
        _number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "1 switches it off")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -1e6, 1e6, "0 switches it off")
        if self.top_k is not None:
            checked_integer(self.top_k, "top_k", 1, why="None switches it off")
        if self.seed is not None:
            object.__setattr__(self, "seed", checked_integer(self.seed, "seed", 0, 2**64 - 1))  # NumPy's are narrow
        if type(self.logprobs) is not bool:
            raise InputError(f"logprobs is {self.logprobs!r}: use True or False; only the chosen token's is given")
        _check_bias(self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # what the caller does to theirs changes nothing

    @property
    def is_greedy(self) -> bool:
        """Nothing is asked for but the likeliest token."""
        return replace(self, seed=None, top_k=None, top_p=1.0, min_p=0.0) == GREEDY

    def seeded(self) -> "Sampling":
        """With a seed: its own, or a new one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    def check_ids(self, vocab_size: int) -> None:
        """Raises InputError unless all biased ids are below vocab_size."""
        for token in self.logit_bias:
            checked_integer(token, "an id in logit_bias", 0, vocab_size - 1)


def _number(name: str, value: Any, low: float, high: float, hint: str, above: bool = False) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not low <= value <= high or (above and value == low):
        bounds = f"above {low:g} and at most {high:g}" if above else f"in {low:g}..{high:g}"
        raise InputError(f"{name} is {value!r}: use a number {bounds} ({hint})")


def _check_bias(bias: Any) -> None:
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias is {bias!r}: give a mapping from token ids to numbers")
    if len(bias) > MOST_BIASED:
        raise InputError(f"logit_bias has {len(bias)} ids: at most {MOST_BIASED}")
    for token, value in bias.items():
        if not isinstance(token, Integral):
            raise InputError(f"logit_bias has the id {token!r}: use integers")
        _number(f"logit_bias of id {token}", value, -1e6, 1e6, "a logit difference")


GREEDY = Sampling()


@dataclass(frozen=True)
class Choice:
    """Of one row: how tokens are chosen, what stops it, and where its answer begins. `sampling` has a seed."""

    sampling: Sampling
    stop_ids: tuple[int, ...]
    prompt_len: int


NOTHING = Choice(Sampling(seed=0), (), 0)  # of a row that is none

ItemT = TypeVar("ItemT")


def row_options(choices: Sequence[Choice], num_stop_ids: int, num_biased: int) -> RowOptions:
    """The choices of R rows as arrays for the device, padded to n = num_stop_ids and m = num_biased."""
    sampling = [choice.sampling for choice in choices]
    seeds = [s.seed or 0 for s in sampling]

    def floats(name: str) -> np.ndarray:
        return np.array([getattr(s, name) for s in sampling], np.float32)

    return RowOptions(
        stop_ids=np.array([_filled(c.stop_ids, num_stop_ids, NO_STOP) for c in choices], np.int32),
        temperature=floats("temperature"),
        top_k=np.array([min(s.top_k or NO_ID, NO_ID) for s in sampling], np.int32),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        seed=np.array([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds], np.uint32),
        prompt_len=np.array([choice.prompt_len for choice in choices], np.int32),
        repetition_penalty=floats("repetition_penalty"),
        presence_penalty=floats("presence_penalty"),
        frequency_penalty=floats("frequency_penalty"),
        bias_ids=np.array([_filled(list(s.logit_bias), num_biased, NO_ID) for s in sampling], np.int32),
        bias=np.array([_filled(list(s.logit_bias.values()), num_biased, 0.0) for s in sampling], np.float32),
        logprobs=np.array([s.logprobs for s in sampling]),
    )


def _filled(items: Sequence[ItemT], length: int, filler: ItemT) -> list[ItemT]:
    return [*items, *[filler] * (length - len(items))]
