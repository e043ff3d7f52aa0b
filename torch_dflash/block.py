"""The block step: one non-causal pass over [anchor, mask, ...] proposes a whole block (arXiv:2602.06036, section 3).

It is the same wherever a drafter runs; attention, and where its context lies, are the caller's.

Letters: R rows, T tokens, B block_size, K number of drafts used (<= B-1), E drafter hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from bridge.positions import block_positions
from bridge.views import Params, lower
from torch_dflash.config import DrafterConfig
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.layers import Attend
from torch_dflash.sampling import greedy

Guess = Callable[[Array], Array]  # logits [R,K,V] behind the positions committed_len.. -> ids int32[R,K]


class Ends(Protocol):
    """The target's two ends, which a drafter shares."""

    @property
    def embed(self) -> Callable[..., Array]:
        """f(params, ids int32[R,T]) -> [R,T,E]"""

    @property
    def logits(self) -> Callable[..., Array]:
        """f(params, normed hidden states [R,T,E]) -> [R,T,V]"""


@dataclass(frozen=True)
class DrafterFunctions:
    """The drafter's methods as pure JAX functions f(params, ...).

    `embed` and `head` (logits and target_ids of a head of its own) are None where the target's serve. `project` and
    `context_key_value` are the two halves of `absorb`.
    """

    config: DrafterConfig
    absorb: Callable[..., tuple[Array, Array]]
    forward: Callable[..., Array]
    project: Callable[..., Array]
    context_key_value: Callable[..., tuple[Array, Array]]
    embed: Callable[..., Array] | None = None
    head: tuple[Callable[..., Array], Callable[..., Array]] | None = None


def lower_drafter(module: Drafter, config: DrafterConfig) -> DrafterFunctions:
    """Lower a drafter module; its parameters are arguments of the results."""
    embed = None if module.embed_tokens is None else lower(module, "embed")
    head = None if module.lm_head is None else (lower(module, "logits"), lower(module, "target_ids"))
    absorb, project, context = (lower(module, name) for name in ("absorb", "project", "context_key_value"))
    return DrafterFunctions(config, absorb, lower(module), project, context, embed, head)


def draft_block(
    drafter: DrafterFunctions,
    params: Params,
    target: Ends,
    target_params: Any,
    anchor: Array,
    start: Array,
    num_drafts: int,
    attend: Attend,
    guess: Guess,
) -> Array:
    """draft_ids int32[R,K], draft_ids[:, j] for position start + j + 1, behind anchor int32[R] at positions start [R].

    `attend` lets the block see the context of positions 0..start-1 and itself.
    """
    config = drafter.config
    noise_ids = jnp.pad(anchor[:, None], ((0, 0), (0, config.block_size - 1)), constant_values=config.mask_token_id)
    noise = target.embed(target_params, noise_ids) if drafter.embed is None else drafter.embed(params, noise_ids)
    hidden = drafter.forward(params, noise, block_positions(start, config.block_size), attend, None)
    hidden = hidden[:, 1 : num_drafts + 1]
    if drafter.head is None:
        return guess(target.logits(target_params, hidden))
    # A drafter's own head is never replaced; it knows fewer ids than the noise of `guess` has: its likeliest.
    logits, target_ids = drafter.head
    return target_ids(params, greedy(logits(params, hidden)))
