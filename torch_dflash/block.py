"""The block step: one non-causal pass over [anchor, mask, ...] proposes a whole block (arXiv:2602.06036, section 3).

It is the same wherever a drafter runs; attention, and where its context lies, are the caller's.

Letters: R rows, T tokens, B block_size, K number of drafts used (<= B-1), E drafter hidden size, V vocabulary, C
candidates of a position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from bridge.platform import Platform
from bridge.positions import block_positions
from bridge.views import Params, lower
from torch_dflash.config import DrafterConfig, Scales
from torch_dflash.likeliest import Several, greedy, greedy_several
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.layers import Attend


@dataclass(frozen=True)
class Guess:
    """How drafts are taken from logits [R,K,V] behind the positions committed_len.."""

    one: Callable[[Array], Array]  # -> ids int32[R,K]
    several: Callable[[Array, int], Several]  # with C -> the candidates among which a selector chooses
    keep: Callable[[Array], Array]  # their logits [R,T,C] -> with -inf for what the row excludes


def likeliest(platform: Platform) -> Guess:
    """The likeliest tokens. platform: over which the logits are spread."""

    def several(logits: Array, count: int) -> Several:
        return jax.tree.map(platform.by_rows, greedy_several(logits, count, platform.model))

    return Guess(greedy, several, lambda logits: logits)


LIKELIEST = likeliest(Platform())  # on one device


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
    `context_key_value` are the two halves of `absorb`. `edges` is DFlash 2's, None in v1.
    """

    config: DrafterConfig
    absorb: Callable[..., tuple[Array, Array]]
    forward: Callable[..., Array]
    project: Callable[..., Array]
    context_key_value: Callable[..., tuple[Array, Array]]
    embed: Callable[..., Array] | None = None
    head: tuple[Callable[..., Array], Callable[..., Array]] | None = None
    edges: Callable[..., Array] | None = None


def lower_drafter(module: Drafter, config: DrafterConfig) -> DrafterFunctions:
    """Lower a drafter module; its parameters are arguments of the results."""
    embed = None if module.embed_tokens is None else lower(module, "embed")
    head = None if module.lm_head is None else (lower(module, "logits"), lower(module, "target_ids"))
    absorb, project, context = (lower(module, name) for name in ("absorb", "project", "context_key_value"))
    edges = None if module.candidate_selector is None else lower(module, "edges")
    return DrafterFunctions(config, absorb, lower(module), project, context, embed, head, edges)


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
    noise = noise * config.scales.input_embedding
    hidden = drafter.forward(params, noise, block_positions(start, config.block_size), attend, None)
    hidden = hidden[:, 1 : num_drafts + 1]
    if drafter.head is not None:
        # A drafter's own head is never replaced; it knows fewer ids than the noise of `guess` has: its likeliest.
        logits, target_ids = drafter.head
        return target_ids(params, greedy(logits(params, hidden)))
    scaled = scale_logits(config.scales, target.logits(target_params, hidden))
    if drafter.edges is None or config.selector is None:
        return guess.one(scaled)
    several = guess.several(scaled, config.selector.top_k)
    edges = drafter.edges(params, hidden, tokens_before(anchor, several.ids), several.ids)
    return select(several, edges, guess.keep)


def scale_logits(scales: Scales, logits: Array) -> Array:
    """[..., V], multiplied and softly bounded."""
    logits = logits * scales.output
    return logits if scales.softcapping is None else jnp.tanh(logits / scales.softcapping) * scales.softcapping


def tokens_before(anchor: Array, candidates: Array) -> Array:
    """int32[R,K,C]: what may stand before each position: the anchor int32[R], else the candidates of the one before."""
    anchors = jnp.broadcast_to(anchor[:, None, None], (len(anchor), 1, candidates.shape[2]))
    return jnp.concatenate([anchors, candidates[:, :-1]], axis=1)


@jax.named_scope("select")
def select(several: Several, edges: Array, keep: Callable[[Array], Array]) -> Array:
    """int32[R,K]: from left to right, at each position the candidate with the largest sum of its logit, its edge from
    the one chosen before it, and its noise. edges [R,K,C,C], [r,k,a,b] from a to b; at the first position all a are
    alike."""
    edges = edges * several.scale[:, None, None, None]

    def take(at: Array, position: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        logits, edges, noise = position
        behind = logits + jnp.take_along_axis(edges, at[:, None, None], axis=1)[:, 0]
        at = greedy(keep(behind[:, None])[:, 0] + noise)
        return at, at

    by_position = tuple(jnp.moveaxis(x, 1, 0) for x in (several.logits, edges, several.noise))
    _, path = lax.scan(take, jnp.zeros(len(edges), jnp.int32), by_position)
    return jnp.take_along_axis(several.ids, path.T[:, :, None], axis=2)[:, :, 0]
