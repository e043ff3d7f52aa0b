"""What a request may ask for: one line that names the field for everything else, and arrays in the right places."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from helpers import Loaded

from torch_dflash import InputError, Sampling, generate
from torch_dflash.options import NO_ID, NO_STOP, Choice, row_options

NAN, INF, HUGE = float("nan"), float("inf"), 10**400
NO_NUMBERS = ["1", None, True, NAN, INF, -INF, HUGE, 1j, [1.0], np.array([0.5])]
NO_INTEGERS = ["1", 1.0, True, NAN, [1]]


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "values", "remedy"),
    [
        ("temperature", [*NO_NUMBERS, -0.1, 1.1e6], "0 is greedy"),
        ("top_k", [*NO_INTEGERS, 0, -1], "None switches it off"),
        ("top_p", [*NO_NUMBERS, 0, -0.1, 1.001], "1 switches it off"),
        ("min_p", [*NO_NUMBERS, -0.1, 1.001], "0 switches it off"),
        ("seed", [*NO_INTEGERS, -1, 2**64], "0..18446744073709551615"),
        ("repetition_penalty", [*NO_NUMBERS, 0, -1, 1e-7, 1.1e6], "1 switches it off"),
        ("presence_penalty", [*NO_NUMBERS, -1.1e6, 1.1e6], "0 switches it off"),
        ("frequency_penalty", [*NO_NUMBERS, -1.1e6, 1.1e6], "0 switches it off"),
        ("logprobs", [1, 0, None, "yes", 5], "True or False"),
        ("logit_bias", [None, [1], [(1, 2.0)], "3", 4], "mapping"),
        ("logit_bias", [dict.fromkeys(range(1025), 1.0)], "at most 1024"),
        ("logit_bias", [{"3": 1.0}, {1.5: 1.0}, {None: 1.0}], "use integers"),
        ("logit_bias of id 3", [{3: value} for value in [*NO_NUMBERS, 1.1e6]], "a logit difference"),
    ],
)
def test_bad_options_are_refused_by_name(field: str, values: list[Any], remedy: str) -> None:
    for value in values:
        message = refusal(Sampling, **{field.split()[0]: value})
        assert message.startswith(field)
        assert remedy in message


@pytest.mark.parametrize("token", [12, 2**31, 2**70, -1, True])
def test_biased_ids_are_below_the_vocabulary(token: int, tiny: Loaded) -> None:
    message = refusal(generate, tiny.pair, [1, 2], sampling=Sampling(logit_bias={token: 1.0}))
    assert f"an id in logit_bias is {token!r}" in message
    assert "0..11" in message


def test_sampling_is_one_or_one_for_each_prompt(tiny: Loaded) -> None:
    for wrong in ({"temperature": 1.0}, None, 0.7, [Sampling(), None], "greedy"):
        assert refusal(generate, tiny.pair, [[1], [2]], sampling=wrong).startswith("sampling is ")
    for count in (0, 1, 3):
        message = refusal(generate, tiny.pair, [[1], [2]], sampling=[Sampling()] * count)
        assert message == f"sampling has {count} entries for 2 prompts: give one for each"


def test_numbers_of_other_types_are_taken() -> None:
    sampling = Sampling(
        temperature=np.float32(0.5),
        top_k=np.int8(3),
        top_p=Fraction(1, 2),
        seed=np.int32(7),
        logit_bias={np.int64(3): 1},
    )
    row = row_options([Choice(sampling, (), 0)], 1, 1)
    assert (row.temperature, row.top_k, row.top_p, row.bias_ids) == (0.5, 3, 0.5, 3)
    assert row.seed.tolist() == [[7, 0]]
    assert type(sampling.seed) is int


def test_a_mapping_is_copied() -> None:
    bias = {3: 1.0}
    sampling = Sampling(logit_bias=bias)
    bias[4] = 2.0
    assert sampling.logit_bias == {3: 1.0}


def test_new_seeds_are_new() -> None:
    assert Sampling(seed=5).seeded().seed == 5
    seeds = {Sampling().seeded().seed for _ in range(100)}
    assert len(seeds) == 100
    assert max(seed.bit_length() for seed in seeds if seed is not None) > 32


def test_options_stand_in_their_rows() -> None:
    """Every number differs, so one in a wrong place is a wrong one."""
    listed = [
        Sampling(0.5, 3, 0.25, 0.125, 2**32 * 9 + 8, 1.5, 0.75, -0.5, {7: 2.5}, True),
        Sampling(1.5, None, 0.5, 0.0625, 6, 1.25, -0.25, 0.375, {2: -1.5, 9: 4.0}),
    ]
    rows = row_options(
        [Choice(s, stop_ids, n) for s, stop_ids, n in zip(listed, [(4, 5), ()], [11, 12], strict=True)], 2, 4
    )
    expected: Mapping[str, list] = {
        "stop_ids": [[4, 5], [NO_STOP, NO_STOP]],
        "temperature": [0.5, 1.5],
        "top_k": [3, NO_ID],
        "top_p": [0.25, 0.5],
        "min_p": [0.125, 0.0625],
        "seed": [[8, 9], [6, 0]],
        "prompt_len": [11, 12],
        "repetition_penalty": [1.5, 1.25],
        "presence_penalty": [0.75, -0.25],
        "frequency_penalty": [-0.5, 0.375],
        "bias_ids": [[7, NO_ID, NO_ID, NO_ID], [2, 9, NO_ID, NO_ID]],
        "bias": [[2.5, 0, 0, 0], [-1.5, 4.0, 0, 0]],
        "logprobs": [True, False],
    }
    assert {name: value.tolist() for name, value in vars(rows).items()} == expected
