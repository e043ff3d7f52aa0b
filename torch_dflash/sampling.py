"""From logits to token ids: the target's choice behind every position of a block, greedy or drawn, on the device.

A draw is a function of the row's seed and the token's position, of nothing else: the same seed gives the same text
whatever the neighbours, the block size or the drafts. Drafts are guesses of that choice: one is accepted when the
target draws it, and what is emitted is always the target's own draw. So this is exact, whatever the drafter does.

A drafter guesses best with the noise that the target will draw with: where its distribution is the target's, every
guess is right (Daliri, Musco and Suresh, arXiv:2408.07978; their drafter-invariant decoding). The DFlash paper's rule,
the likeliest token against rejection sampling, is right with the probability of that token.

Letters: R rows, T tokens, V vocabulary, N positions of a row, n stop ids, m biased ids.
"""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import threefry_2x32

from bridge.positions import block_positions
from torch_dflash.likeliest import Several, best, greedy, greedy_several

LARGEST_SCALE = 1e30  # of the edges at a tiny temperature: infinity times zero would be no number
EXCLUDED = 1e4  # far more than logits and noise differ by
LEAST_TOP_P = 1e-30  # far below the largest probability of any vocabulary


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowOptions:
    """What the rows' requests ask for. The host sends it with every dispatch; options.py builds it."""

    stop_ids: Array  # int32[R,n]  filled up with -1
    temperature: Array  # f32[R]  0: greedy
    top_k: Array  # int32[R]  V or more: off
    top_p: Array  # f32[R]  1: off
    min_p: Array  # f32[R]  0: off
    seed: Array  # uint32[R,2]
    prompt_len: Array  # int32[R]
    repetition_penalty: Array  # f32[R]  1: off
    presence_penalty: Array  # f32[R]  0: off
    frequency_penalty: Array  # f32[R]  0: off
    bias_ids: Array  # int32[R,m]  filled up with a number >= V
    bias: Array  # f32[R,m]
    logprobs: Array  # bool[R]


class Choose(Protocol):
    """How the target's tokens are chosen: `choose`, or `choose_greedily` where no request asks for more."""

    def __call__(self, logits: Array, ids: Array, start: Array, options: RowOptions) -> tuple[Array, Array]:
        """The target's token behind each of the positions start.. [R], and its log-probability, both [R,T].

        logits [R,T,V] of these positions; ids int32[R,N] holds the row's tokens up to and including them.
        """

    def several(self, logits: Array, ids: Array, start: Array, options: RowOptions, count: int, chips: int) -> Several:
        """The `count` tokens nearest to being chosen, where a drafter has not had its last word. No filter has been
        applied to them yet. chips: that share V."""

    def keep(self, logits: Array, options: RowOptions) -> Array:
        """[R,T,C], divided by the temperature, with -inf for what the rows' filters exclude."""


@dataclass(frozen=True)
class _Greedily:
    """`choose` for rows that are all greedy: the same tokens, and less to compile. Log-probabilities are zeros."""

    @jax.named_scope("choose")
    def __call__(self, logits: Array, ids: Array, start: Array, options: RowOptions) -> tuple[Array, Array]:
        return greedy(logits), jnp.zeros(logits.shape[:2], jnp.float32)

    @jax.named_scope("choose")
    def several(self, logits: Array, ids: Array, start: Array, options: RowOptions, count: int, chips: int) -> Several:
        return greedy_several(logits, count, chips)

    def keep(self, logits: Array, options: RowOptions) -> Array:
        return logits


@dataclass(frozen=True)
class _Choose:
    """Rows that ask for nothing special cost an argmax: what others ask for is decided on the device, without a
    recompilation."""

    @jax.named_scope("choose")
    def __call__(self, logits: Array, ids: Array, start: Array, options: RowOptions) -> tuple[Array, Array]:
        def special() -> Array:
            scaled, noise = _drawing(logits, ids, start, options)
            return greedy(self.keep(scaled, options) + noise)

        token = lax.cond(_asks(options).any(), special, lambda: greedy(logits))
        nothing = jnp.zeros(token.shape, jnp.float32)
        return token, lax.cond(options.logprobs.any(), lambda: _logprobs(logits, token), lambda: nothing)

    @jax.named_scope("choose")
    def several(self, logits: Array, ids: Array, start: Array, options: RowOptions, count: int, chips: int) -> Several:
        scale = jnp.minimum(1 / jnp.where(options.temperature > 0, options.temperature, 1), LARGEST_SCALE)

        def special() -> Several:
            scaled, noise = _drawing(logits, ids, start, options)
            excluded = jnp.isneginf(self.keep(scaled, options))
            # The likeliest of what is excluded come behind all others: their edges may bring them back.
            _, nearest = best(jnp.where(excluded, scaled - EXCLUDED, scaled + noise), count, chips)
            logits_of, noise_of = (jnp.take_along_axis(x, nearest, axis=-1) for x in (scaled, noise))
            return Several(nearest, logits_of, noise_of, scale)

        return lax.cond(_asks(options).any(), special, lambda: greedy_several(logits, count, chips))

    def keep(self, logits: Array, options: RowOptions) -> Array:
        filters = (options.top_k < logits.shape[-1]) | (options.top_p < 1) | (options.min_p > 0)
        return lax.cond(filters.any(), lambda: keep(logits, options), lambda: logits)


choose_greedily, choose = _Greedily(), _Choose()


def _asks(options: RowOptions) -> Array:
    """bool[R]: the row asks for more than the likeliest token."""
    return (options.temperature > 0) | _adjusts(options)


def _drawing(logits: Array, ids: Array, start: Array, options: RowOptions) -> tuple[Array, Array]:
    """Both f32[R,T,V]: adjusted logits, divided by the row's temperature, and noise; where they are added, the largest
    is a draw. Of greedy rows the logits, and zeros. Arguments as those of `choose`."""
    logits = lax.cond(
        _adjusts(options).any(), lambda: adjust(logits, ids, start, options), lambda: logits.astype(jnp.float32)
    )
    temperature = options.temperature[:, None, None]
    # Relative to the largest, so that a tiny temperature overflows to -inf and never to NaN.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)
    # Apart, or XLA on CPU makes each number twice, inside the reductions.
    position = block_positions(start + 1, logits.shape[1])
    noise = lax.optimization_barrier(_gumbel(options.seed, position, logits.shape[-1]))
    return jnp.where(temperature > 0, scaled, logits), jnp.where(temperature > 0, noise, 0)


def _adjusts(options: RowOptions) -> Array:
    """bool[R]: the row changes its logits before anything is chosen."""
    penalised = (options.presence_penalty != 0) | (options.frequency_penalty != 0) | (options.repetition_penalty != 1)
    return penalised | (options.bias != 0).any(axis=1)


def adjust(logits: Array, ids: Array, start: Array, options: RowOptions) -> Array:
    """Logit bias, then penalties, in f32: for each position by the tokens up to it, drafts of the block included.

    The repetition penalty (CTRL, as in Hugging Face) counts prompt and answer: positive logits are divided by it,
    others multiplied. Presence and frequency penalties (as in OpenAI's API) count the answer only.
    """
    width, each = logits.shape[1], jnp.arange(ids.shape[0])[:, None]
    position = jnp.arange(ids.shape[1], dtype=jnp.int32)
    logits = logits.astype(jnp.float32).at[each, :, options.bias_ids].add(options.bias[:, :, None], mode="drop")
    block = jnp.take_along_axis(ids, jnp.minimum(block_positions(start, width), ids.shape[1] - 1), axis=1)
    drafts = jax.nn.one_hot(block, logits.shape[2]).at[:, 0].set(0).cumsum(axis=1)  # the anchor is no draft

    def count(first: Array) -> Array:  # int32[R] -> f32[R,T,V]: each token, at positions from `first` on
        known = (position >= first[:, None]) & (position <= start[:, None])
        times = jnp.zeros(logits.shape[::2]).at[each, ids].add(known.astype(jnp.float32), mode="drop")
        return times[:, None] + drafts

    repetition, presence, frequency = (
        value[:, None, None]
        for value in (options.repetition_penalty, options.presence_penalty, options.frequency_penalty)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(count(jnp.zeros_like(start)) > 0, repeated, logits)
    answered = count(options.prompt_len)
    return logits - frequency * answered - presence * (answered > 0)


def keep(logits: Array, options: RowOptions) -> Array:
    """[R,T,V] with -inf for what top-k, then top-p of what is left, then min-p exclude (Hugging Face's order).

    Tokens as likely as the last one kept are kept too, so no order among equals matters.
    """
    top_k, top_p, min_p = (value[:, None] for value in (options.top_k, options.top_p, options.min_p))
    lowest = _threshold(logits, jnp.ones_like(logits), top_k.astype(jnp.float32))
    logits = jnp.where(logits >= lowest[..., None], logits, -jnp.inf)
    probs = jax.nn.softmax(logits)
    # 2: more than there is, so all stay. Never 0, as a tiny top_p may be in f32: the likeliest token stays.
    lowest = _threshold(logits, probs, jnp.where(top_p < 1, jnp.maximum(top_p, LEAST_TOP_P), 2))
    lowest = jnp.maximum(lowest, logits.max(axis=-1) + jnp.log(min_p))
    return jnp.where(logits >= lowest[..., None], logits, -jnp.inf)


def _threshold(values: Array, weights: Array, wanted: Array) -> Array:
    """[R,T]: the largest value v such that all values >= v together weigh at least `wanted` [R,T]; -inf if none does.

    Found bit by bit instead of by sorting V values, which is slow on TPU and CPU alike.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # the order of the floats, as integers

    def narrow(i: Array, low: Array) -> Array:
        higher = low | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        weight = jnp.where(ordered >= higher[..., None], weights, 0).sum(axis=-1)
        return jnp.where(weight >= wanted, higher, low)

    low = lax.fori_loop(0, 32, narrow, jnp.zeros(values.shape[:-1], jnp.uint32))
    found = lax.bitcast_convert_type(jnp.where(low >> 31 == 1, low ^ jnp.uint32(1 << 31), ~low), jnp.float32)
    return jnp.where(low == 0, -jnp.inf, found)


def _gumbel(seed: Array, position: Array, vocab_size: int) -> Array:
    """Noise f32[R,T,V] whose argmax over logits + noise is a draw from softmax(logits).

    A counter-based generator (Threefry): the key is the row's seed, the counter (position, token). So no state is kept
    that could be frozen, shared or lost, and no two numbers of a row have the same counter.
    """
    width = position.shape[1]
    token = jnp.tile(jnp.arange(vocab_size, dtype=jnp.uint32), width)

    def of_row(seed: Array, position: Array) -> Array:  # flat: a second vmap would take XLA seconds to compile
        counters = jnp.concatenate([jnp.repeat(position.astype(jnp.uint32), vocab_size), token])
        return threefry_2x32(seed, counters)[: token.size].reshape(width, vocab_size)  # which pairs the two halves

    bits = jax.vmap(of_row)(seed, position)
    # In (0, 1). Small numbers give the large noise that wins, and are as fine as the bits allow. The largest would
    # round to 1, whose noise is infinite.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2**-32, 1 - 2**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _logprobs(logits: Array, token: Array) -> Array:
    """log p(token) under the target's own distribution: before bias, penalties, temperature and filters."""
    normed = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(normed, token[..., None], axis=-1)[..., 0]
