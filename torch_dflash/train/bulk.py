"""Many answers at once, for an accelerator: a fixed batch, a contiguous K/V cache, the whole loop on the device.

The engine serves requests one prefill at a time, which is right for serving and too slow for 100,000 answers. This one
also samples: the first `num_sampled` tokens of a row are drawn at temperature 1, the rest is greedy.

Letters: R rows, P prompt width, N new tokens at most, W = P + N slots, K key/value heads, H query heads, d head_dim.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from tqdm import tqdm

from bridge.jnp_attention import HIDDEN
from bridge.positions import block_positions, round_up
from bridge.views import Params
from torch_dflash.train.features import causal_attention
from torch_dflash.train.loss import product_dtype
from torch_dflash.train.records import Answer
from torch_dflash.verify import TargetFunctions

GROUP = 256  # ids whose weights are added up first
BELOW_ONE = 1 - 2.0**-20  # a running sum of float32 is not exact

Cache = tuple[tuple[Array, Array], ...]  # per layer: keys [R,K,d,W], three times as quick on a CPU, values [R,K,W,d]


@dataclass(frozen=True)
class BulkPlan:
    """The shapes of one batch."""

    rows: int = 1024
    prompt_width: int = 256
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Opening:
    """A prompt to be answered: which one, its ids, and how many tokens are to be drawn before the text turns greedy."""

    index: int
    prompt_ids: tuple[int, ...]
    num_sampled: int


def _empty_cache(target: TargetFunctions, plan: BulkPlan, dtype: Any) -> Cache:
    block, width = target.config.block, plan.prompt_width + plan.max_new_tokens
    dtype = product_dtype(dtype)  # XLA on CPU would widen the whole of a bf16 cache in order to write a token
    keys = jnp.zeros((plan.rows, block.num_kv_heads, block.head_dim, width), dtype)
    return ((keys, jnp.swapaxes(keys, 2, 3)),) * target.config.num_layers


def _with_layer(cache: Cache, layer: int, pair: tuple[Array, Array]) -> Cache:
    return (*cache[:layer], pair, *cache[layer + 1 :])


def _attend_prompt(layer: int, q: Array, key: Array, value: Array, cache: Cache) -> tuple[Array, Cache]:
    """Causal attention among the prompt's tokens, whose keys and values fill slots 0..P-1."""
    keys, values = cache[layer]
    keys = lax.dynamic_update_slice(keys, key.transpose(0, 2, 3, 1).astype(keys.dtype), (0, 0, 0, 0))
    values = lax.dynamic_update_slice(values, value.transpose(0, 2, 1, 3).astype(values.dtype), (0, 0, 0, 0))
    out, _ = causal_attention(layer, q, key, value, None)
    return out, _with_layer(cache, layer, (keys, values))


def _attend_token(at: Array) -> Callable[..., tuple[Array, Cache]]:
    """Attention of one new token per row, at slot at[r], over slots 0..at[r]."""

    def attend(layer: int, q: Array, key: Array, value: Array, cache: Cache) -> tuple[Array, Cache]:
        rows, head_dim = q.shape[0], q.shape[-1]
        row, (keys, values) = jnp.arange(rows), cache[layer]
        keys = keys.at[row, :, :, at].set(key[:, 0].astype(keys.dtype))
        values = values.at[row, :, at].set(value[:, 0].astype(values.dtype))
        dtype = product_dtype(q.dtype)
        query = q.reshape(rows, keys.shape[1], -1, head_dim).astype(dtype)
        scores = jnp.einsum("rkgd,rkdn->rkgn", query, keys.astype(dtype), preferred_element_type=jnp.float32)
        visible = jnp.arange(keys.shape[3]) <= at[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(visible, scores * head_dim**-0.5, HIDDEN), axis=-1).astype(dtype)
        out = jnp.einsum("rkgn,rknd->rkgd", weights, values.astype(dtype), preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype), _with_layer(cache, layer, (keys, values))

    return attend


def draw(key: Array, logits: Array) -> Array:
    """int32[R], each from softmax(logits [R,V]), by one uniform number a row: on a CPU the Gumbel noise of all ids
    would cost more than the target's layers."""
    rows, size = logits.shape
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = jnp.pad(weights, ((0, 0), (0, -size % GROUP))).reshape(rows, -1, GROUP)
    group, rest = _crossed(weights.sum(axis=-1), jax.random.uniform(key, (rows,)))
    at, _ = _crossed(jnp.take_along_axis(weights, group[:, None, None], axis=1)[:, 0], rest)
    return (group * GROUP + at).astype(jnp.int32)


def _crossed(weights: Array, share: Array) -> tuple[Array, Array]:
    """Where the running sum of weights [R,n] passes share [R] of the whole, and what share of that weight lies before;
    a weight of 0 is never hit."""
    reached = jnp.cumsum(weights, axis=-1)
    wanted = jnp.minimum(share, BELOW_ONE) * reached[:, -1]
    at = (reached <= wanted[:, None]).sum(axis=-1)
    before, own = (jnp.take_along_axis(x, at[:, None], axis=-1)[:, 0] for x in (reached - weights, weights))
    return at, jnp.clip((wanted - before) / own, 0)


@functools.cache
def bulk_program(target: TargetFunctions, plan: BulkPlan, stop_ids: tuple[int, ...]) -> Callable[..., tuple]:
    """f(params, prompt_ids int32[R,P], lengths, num_sampled, key) -> (answers int32[R,N], lengths), all other int32[R].

    An answer's length includes its stop id; what lies behind is zeros.
    """

    def pick(logits: Array, sampled: Array, key: Array) -> Array:
        logits = logits.astype(jnp.float32)
        likeliest = logits.argmax(axis=-1).astype(jnp.int32)
        drawn = lax.cond(sampled.any(), draw, lambda *_: likeliest, key, logits)
        return jnp.where(sampled, drawn, likeliest)

    def program(params: Params, prompt_ids: Array, lengths: Array, num_sampled: Array, key: Array) -> tuple:
        start = jnp.zeros(plan.rows, jnp.int32)
        cache = _empty_cache(target, plan, params["embed_tokens.weight"].dtype)
        hidden, _, cache = target.forward(
            params, prompt_ids, block_positions(start, plan.prompt_width), (), _attend_prompt, cache
        )
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        first = pick(target.logits(params, last), num_sampled > 0, jax.random.fold_in(key, 0))
        answers = jnp.zeros((plan.rows, plan.max_new_tokens), jnp.int32).at[:, 0].set(first)
        done = jnp.isin(first, jnp.array(stop_ids))

        def unfinished(carry: tuple) -> Array:
            return (carry[0] < plan.max_new_tokens) & ~carry[3].all()

        def one(carry: tuple) -> tuple:
            count, token, answers, done, written, cache = carry
            at = lengths + count - 1  # the position of `token`
            hidden, _, cache = target.forward(params, token[:, None], at[:, None], (), _attend_token(at), cache)
            new = pick(target.logits(params, hidden[:, 0]), num_sampled > count, jax.random.fold_in(key, count))
            answers = answers.at[:, count].set(jnp.where(done, 0, new))
            written = jnp.where(done, written, count + 1)
            return count + 1, new, answers, done | jnp.isin(new, jnp.array(stop_ids)), written, cache

        written = jnp.ones(plan.rows, jnp.int32)
        carry = lax.while_loop(unfinished, one, (jnp.int32(1), first, answers, done, written, cache))
        return carry[2], carry[4]

    return jax.jit(program, compiler_options=dict(target.platform.compiler_options))


def bulk_answers(
    target: TargetFunctions,
    params: Params,
    openings: Sequence[Opening],
    plan: BulkPlan,
    stop_ids: tuple[int, ...],
    seed: int,
    done: int = 0,
) -> Iterator[list[Answer]]:
    """Answers in the order of the openings, one list for each batch, without the first `done` batches. Prompts must fit
    in plan.prompt_width."""
    longest = max((len(opening.prompt_ids) for opening in openings), default=1)
    plan = replace(plan, prompt_width=min(plan.prompt_width, round_up(longest, 32)))
    program = bulk_program(target, plan, stop_ids)
    begins = range(0, len(openings), plan.rows)
    for begin in tqdm(begins[done:], desc="answers", unit="batch", initial=done, total=len(begins)):
        some = openings[begin : begin + plan.rows]
        prompts = np.zeros((plan.rows, plan.prompt_width), np.int32)
        lengths, num_sampled = np.ones(plan.rows, np.int32), np.zeros(plan.rows, np.int32)
        for row, opening in enumerate(some):
            lengths[row], num_sampled[row] = len(opening.prompt_ids), opening.num_sampled
            prompts[row, : lengths[row]] = opening.prompt_ids
        key = jax.random.fold_in(jax.random.key(seed), begin)
        ids, count = jax.device_get(program(params, prompts, lengths, num_sampled, key))
        yield [
            Answer(o.index, o.prompt_ids, tuple(ids[row, : count[row]].tolist()), o.num_sampled % plan.max_new_tokens)
            for row, o in enumerate(some)
        ]  # an answer drawn as a whole is trained on as a whole
