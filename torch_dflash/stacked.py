"""Weights as the hardware likes them: turned, and the layers' stacked: one traced layer under `lax.scan` (TPU).

The torch module stays the source of truth: what is traced is its own layer, embedding, norm and head.

Letters: L layers, R rows, T tokens, D hidden size, F tapped layers.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import nn

from bridge.platform import Platform
from bridge.views import TURNED, Params, lower
from torch_dflash.models.target import Target

LAYERS = "layers."
PRODUCTS = tuple(f"{part}.weight" for part in ("proj", "projection", "lm_head", "fc"))

ArrayT = TypeVar("ArrayT", torch.Tensor, Array)


def stacked_name(name: str) -> str:
    """Example: layers.3.mlp.up_proj.weight -> layers.mlp.up_proj.weight; others stay as they are."""
    return LAYERS + name.removeprefix(LAYERS).partition(".")[2] if name.startswith(LAYERS) else name


def stack_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all layers stacked along a new first axis [L, ...]. `tensors` is emptied on the way: at no time
    are all weights held twice."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(stacked_name(name), []).append(name)
    return {
        to: torch.stack([tensors.pop(name).detach() for name in names]) if to.startswith(LAYERS) else tensors.pop(to)
        for to, names in groups.items()
    }


def turn(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with the weights of products [..., out, in] turned to [..., in, out], as `name.T`. `tensors` is
    emptied on the way."""
    return {
        name + TURNED if is_product(name) else name: tensor.mT.contiguous() if is_product(name) else tensor
        for name in list(tensors)
        for tensor in [tensors.pop(name)]
    }


def is_product(name: str) -> bool:
    """Whether a parameter is the weight of a product, and of nothing else (an embedding's rows are also read)."""
    return name.endswith(PRODUCTS)


def lower_stacked(
    module: Target, platform: Platform
) -> tuple[Callable[..., Any], Callable[..., Array], Callable[..., Array]]:
    """forward, embed and logits of a target as pure JAX functions f(params, ...) of stacked parameters."""
    layer, num_layers = lower(module.layers[0]), len(module.layers)
    rest = copy.deepcopy(module)
    rest.layers = nn.ModuleList()
    embed, logits, rotary, norm = (lower(rest, method) for method in ("embed", "logits", "angles", "last_norm"))

    def forward(
        params: Params, ids: Array, positions: Array, taps: tuple[int, ...], attend: Any, cache: Any
    ) -> tuple[Array, Array, Any]:
        own, layers = _split(params)
        angles, hidden = rotary(own, positions), platform.by_rows(embed(own, ids))
        slot_of = jnp.array([taps.index(i) if i in taps else len(taps) for i in range(num_layers)], jnp.int32)
        tapped = jnp.zeros((len(taps) + 1, *hidden.shape), hidden.dtype)  # the last is for what is not tapped

        def one(carry: tuple[Array, Array, Any], layer_of: tuple[Params, Array, Array]) -> Any:
            hidden, tapped, cache = carry
            weights, index, slot = layer_of
            hidden, cache = layer(weights, hidden, angles, index, attend, cache)
            hidden = platform.by_rows(hidden)
            return (hidden, tapped.at[slot].set(hidden), cache), None

        numbers = jnp.arange(num_layers, dtype=jnp.int32)
        (hidden, tapped, cache), _ = lax.scan(one, (hidden, tapped, cache), (layers, numbers, slot_of))
        hidden = norm(own, hidden)
        if num_layers - 1 in taps:  # tapped after the final norm
            tapped = tapped.at[taps.index(num_layers - 1)].set(hidden)
        return hidden, jnp.concatenate([*tapped[: len(taps)], hidden[..., :0]], axis=-1), cache

    def of_rest(function: Callable[..., Array]) -> Callable[..., Array]:
        return lambda params, *args: function(_split(params)[0], *args)

    return forward, of_rest(embed), of_rest(logits)


def _split(params: Params) -> tuple[Params, Params]:
    """What is no layer's, and the layers' [L, ...] under the names that they have within a layer."""
    own = {name: array for name, array in params.items() if not name.startswith(LAYERS)}
    return own, {name.removeprefix(LAYERS): array for name, array in params.items() if name not in own}
