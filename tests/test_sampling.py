"""Choosing tokens from logits, function by function, against their slow twins.

Rows differ in everything: options, lengths, positions, tokens. So a wrong row or column has a wrong value.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
import torch
from sampling_twins import adjusted, choice, filtered, gumbel
from scipy.stats import chi2

from torch_dflash import sampling
from torch_dflash.options import GREEDY, Choice, Sampling, row_options
from torch_dflash.sampling import RowOptions

choose, keep, adjust = jax.jit(sampling.choose), jax.jit(sampling.keep), jax.jit(sampling.adjust)
threshold, production_noise = jax.jit(sampling._threshold), jax.jit(sampling._gumbel, static_argnums=2)

V, T, N = 40, 3, 30
STARTS = np.array([4, 9, 17, 21, 25, 26], np.int32)  # of each row's block
PROMPT_LENS = (2, 9, 12, 1, 20, 26)
FILTERED = [
    Sampling(top_k=3),
    Sampling(top_k=1, min_p=0.3),
    Sampling(top_k=V + 5),
    Sampling(top_k=7, top_p=0.6, min_p=0.2),
    Sampling(top_p=0.9),
    Sampling(top_p=1e-6),
    Sampling(top_p=1e-45, top_k=2),
    Sampling(top_p=0.5, min_p=0.05),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(),
]
ADJUSTED = [
    Sampling(repetition_penalty=1.4),
    Sampling(presence_penalty=0.7),
    Sampling(frequency_penalty=0.45, presence_penalty=-0.2),
    Sampling(logit_bias={3: 2.5, 39: -1.5, 0: 0.25}),
    Sampling(repetition_penalty=0.8, presence_penalty=0.3, frequency_penalty=-0.6, logit_bias={7: -4, 11: 3}),
    Sampling(),
]
DRAWN = [
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.8, top_k=5, seed=2**40 + 3, repetition_penalty=1.5),
    Sampling(temperature=1.0, top_p=0.7, seed=2**64 - 1, logit_bias={4: 1.0}),
    Sampling(temperature=3.0, min_p=0.2, seed=0, presence_penalty=1.0),
    Sampling(temperature=1.3, top_k=9, top_p=0.8, min_p=0.1, seed=77, frequency_penalty=0.5),
    Sampling(frequency_penalty=0.9, seed=4),
]


def options(listed: Sequence[Sampling], prompt_lens: Sequence[int] = ()) -> RowOptions:
    lens = prompt_lens or [0] * len(listed)
    choices = [Choice(s, (), n) for s, n in zip(listed, lens, strict=True)]
    return row_options(choices, 1, 4)


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    return (2.5 * np.random.default_rng(seed).normal(size=(rows, T, V))).astype(np.float32)


def with_ties(rows: int) -> np.ndarray:
    return np.round(random_logits(rows, 1))


def with_excluded(rows: int) -> np.ndarray:
    """Only four tokens are possible at the first position, one at the last."""
    logits = random_logits(rows, 2)
    logits[:, 0, 4:] = -np.inf
    logits[:, -1, :-1] = -np.inf
    return logits


@pytest.mark.parametrize("make", [random_logits, with_ties, with_excluded])
def test_filters_keep_what_hugging_face_keeps(make: Callable[[int], np.ndarray]) -> None:
    logits = make(len(FILTERED))
    kept = np.asarray(keep(logits, options(FILTERED)))
    for row, s in enumerate(FILTERED):
        np.testing.assert_array_equal(kept[row], filtered(s, logits[row]), err_msg=str(s))


def test_filters_by_example() -> None:
    probs = np.log(np.array([[[0.1, 0.4, 0.2, 0.2, 0.1]]] * 5, np.float32))
    asked = [Sampling(top_k=2), Sampling(top_p=0.4), Sampling(top_p=0.41), Sampling(min_p=0.4), Sampling(top_k=1)]
    kept = np.isfinite(keep(probs, options(asked)))[:, 0]
    expected = ["01110", "01000", "01110", "01110", "01000"]
    assert ["".join("1" if token else "0" for token in row) for row in kept] == expected


def test_the_threshold_is_the_largest_value_that_weighs_enough() -> None:
    source = np.random.default_rng(3)
    values = source.normal(size=(7, 4, 20)).astype(np.float32).round(1)
    values[0, 0, :] = -np.inf
    values[1, :, :9] = -np.inf
    values[2] = np.abs(values[2])
    values[3] = -np.abs(values[3])
    weights = source.integers(0, 4, values.shape).astype(np.float32)
    wanted = np.array([[1], [5], [25], [2], [3], [1000], [17]], np.float32)
    found = np.asarray(threshold(values, weights, wanted))
    for row, column in np.ndindex(found.shape):
        v, w = values[row, column], weights[row, column]
        enough = [x for x in v if w[v >= x].sum() >= wanted[row, 0]]
        assert found[row, column] == max(enough, default=-np.inf)


def texts() -> np.ndarray:
    """int32[R,N]: tokens of each row; some twice; what lies behind a row's block is there too, and must not count."""
    position, row = np.arange(N), np.arange(len(STARTS))[:, None]
    return ((7 * position + 13 * row + (position % 4 == 3)) % (V // 2)).astype(np.int32)


def test_penalties_and_bias_follow_each_position_of_the_block() -> None:
    ids, logits = texts(), random_logits(len(ADJUSTED))
    asked = options(ADJUSTED, PROMPT_LENS)
    result = np.asarray(adjust(logits, ids, STARTS, asked))
    for row, t in np.ndindex(result.shape[:2]):
        known = ids[row, : STARTS[row] + t + 1].tolist()
        expected = adjusted(ADJUSTED[row], logits[row, t], known, PROMPT_LENS[row])
        np.testing.assert_allclose(result[row, t], expected, rtol=1e-6, atol=1e-6)
    assert (result != logits).any(axis=2).all(axis=1).tolist() == [True] * 5 + [False]


def test_logprobs_are_the_targets_own() -> None:
    logits = random_logits(6)
    asked = [Sampling(temperature=2.0, top_k=4, seed=1, logprobs=True, logit_bias={2: 3.0}), *[GREEDY] * 5]
    token, logprobs = choose(logits, texts(), STARTS, options(asked, PROMPT_LENS))
    expected = torch.log_softmax(torch.tensor(logits), -1).gather(2, torch.tensor(np.array(token))[..., None].long())
    np.testing.assert_allclose(logprobs, expected[..., 0], rtol=1e-5, atol=1e-6)
    _, nothing = choose(logits, texts(), STARTS, options([GREEDY] * 6, PROMPT_LENS))
    assert not np.asarray(nothing).any()


def test_draws_equal_the_twins() -> None:
    """Everything at once, exactly: penalties, temperature, filters and the noise of each position."""
    ids, logits, start = texts(), random_logits(len(DRAWN), 5), STARTS
    token, _ = choose(logits, ids, start, options(DRAWN, PROMPT_LENS))
    for row, t in np.ndindex(len(DRAWN), T):
        known = ids[row, : start[row] + t + 1].tolist()
        assert token[row, t] == choice(DRAWN[row], logits[row, t], known, PROMPT_LENS[row])


def test_a_row_draws_the_same_alone() -> None:
    ids, logits, start = texts(), random_logits(len(DRAWN), 5), STARTS
    together, _ = choose(logits, ids, start, options(DRAWN, PROMPT_LENS))
    for row, s in enumerate(DRAWN):
        one = slice(row, row + 1)
        alone, _ = choose(logits[one], ids[one], start[one], options([s], PROMPT_LENS[one]))
        assert alone[0].tolist() == together[row].tolist()


def test_a_temperature_near_zero_is_greedy() -> None:
    """Also where f32 has no such number, or the scaled logits overflow."""
    asked = [Sampling(temperature=t, seed=9) for t in (1e-6, 1e-15, 1e-30, 1e-38, 1e-42, 1e-60)]
    logits = random_logits(6)
    token, _ = choose(logits, texts(), STARTS, options(asked))
    assert token.tolist() == logits.argmax(-1).tolist()


def noise(seeds: Sequence[int], positions: int, vocab_size: int) -> np.ndarray:
    """[R,T,V] of the production generator."""
    seed = options([Sampling(seed=s) for s in seeds]).seed
    position = np.tile(np.arange(positions, dtype=np.int32), (len(seeds), 1))
    return np.asarray(production_noise(seed, position, vocab_size))


def test_the_noise_is_threefry_of_seed_position_and_token() -> None:
    seeds = (0, 1, 2**32, 2**32 + 1, 2**64 - 1, 123456789012345)
    expected = [[gumbel(seed, position, V) for position in range(T)] for seed in seeds]
    np.testing.assert_allclose(noise(seeds, T, V), expected, rtol=2e-5, atol=2e-6)


def test_the_noise_is_uniform_and_independent() -> None:
    """As probabilities: 64 equal bins, and no correlation with the next token, position, seed, or high seed word."""
    uniform = np.exp(-np.exp(-noise((1, 2, 2**32 + 1, 2**32 + 2), 64, 1024).astype(np.float64)))
    counts = np.bincount((uniform.ravel() * 64).astype(int), minlength=64)
    assert chi2.sf(((counts - counts.mean()) ** 2 / counts.mean()).sum(), 63) > 1e-3
    for axis in (0, 1, 2):
        assert independent(np.take(uniform, range(1, uniform.shape[axis]), axis), uniform[shorter(axis)])
    assert independent(uniform[:2], uniform[2:])
    assert not independent(uniform, uniform**3)


def shorter(axis: int) -> tuple[slice, ...]:
    return tuple(slice(-1) if i == axis else slice(None) for i in range(3))


def independent(a: np.ndarray, b: np.ndarray) -> bool:
    """No correlation beyond four standard errors."""
    return abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * a.size**0.5 < 4


def test_noise_is_finite_where_the_bits_are_all_ones() -> None:
    """This seed, position and token have the bits 0xffffff96, which f32 rounds to 2**32. Infinite noise would choose a
    token that cannot be chosen."""
    seed, position, token = 5, 2442945, 25
    at = np.array([[position]], np.int32)
    assert np.isfinite(production_noise(np.array([[seed, 0]], np.uint32), at, V)).all()
    for logit in (-100.0, -np.inf):
        logits = np.zeros((1, T, V), np.float32)
        logits[0, 0, token] = logit
        asked = options([Sampling(temperature=1.0, seed=seed)])
        drawn, _ = choose(logits, texts()[:1], at[0] - 1, asked)
        assert drawn[0, 0] != token
