"""How DFlash 2's selector is trained: not its tables but linear maps of the target's embedding onto them, so that rare
tokens learn from the others, and of the hidden state a few directions. Free ones learn more of the training texts and
less of all others (docs/training-sweep.md).

Letters: V vocabulary, E drafter hidden size, r rank, m directions.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax

from bridge.views import Params
from torch_dflash.config import Convolution, DrafterConfig, Selector
from torch_dflash.train.batches import generator

PART = "candidate_selector."  # begins the names of its parameters
DIRECTIONS = 4
_TABLES = {PART + "predecessor_codebook": PART + "predecessor_map", PART + "successor_codebook": PART + "successor_map"}
_PLACE, _DIRECTIONS = PART + "place_map", PART + "directions"
_PROJECTION = PART + "hidden_projection.weight"


def with_selector(config: DrafterConfig, selector: Selector) -> DrafterConfig:
    """A drafter's config with this selector. A DFlash v1 drafter becomes one of DFlash 2, with convolutions that change
    nothing: one position, all channels together."""
    neutral = Convolution(1, config.block.hidden_size)
    return replace(config, selector=selector, convolution=config.convolution or neutral)


def start_maps(selector: Selector, size: int, seed: int) -> Params:
    """What is trained in the tables' place, float32. No successor is preferred yet, so nothing is changed at first."""
    draw = generator(seed, 4)

    def random(*shape: int) -> Array:
        return jnp.asarray(draw.standard_normal(shape) * size**-0.5, jnp.float32)

    predecessor, successor = _TABLES.values()
    return {
        predecessor: random(size, selector.rank),
        successor: jnp.zeros((size, selector.rank), jnp.float32),
        _PLACE: jnp.full((selector.rank, DIRECTIONS), DIRECTIONS**-0.5, jnp.float32),
        _DIRECTIONS: random(DIRECTIONS, size),
    }


def tables(params: Params, embedding: Array) -> Params:
    """The selector's own parameters for trained maps, in their dtype; others stay. embedding: the target's [V,E]."""
    maps = {table: name for table, name in _TABLES.items() if name in params}
    if not maps:
        return params
    rest = {name: value for name, value in params.items() if name not in (*maps.values(), _PLACE, _DIRECTIONS)}
    wide = embedding.astype(jnp.float32)
    rows = wide * lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + 1e-12)
    made = {table: _product(rows, params[name]) for table, name in maps.items()}
    return rest | made | {_PROJECTION: _product(params[_PLACE], params[_DIRECTIONS])}


def _product(left: Array, right: Array) -> Array:
    """In the right one's dtype, accumulated in float32."""
    out = jnp.matmul(left.astype(right.dtype), right, preferred_element_type=jnp.float32)
    return out.astype(right.dtype)


def stillness(edges: Array, used: Array) -> Array:
    """How much the edges f32[R,A,C] behind the anchors differ among themselves. The drafter knows the anchor: what it
    has not learnt of it in training, the selector would only learn by heart."""
    spread = jnp.square(edges - edges.mean(axis=-1, keepdims=True)).mean(axis=-1)
    return (spread * used).sum() / jnp.maximum(used.sum(), 1)
