"""The training loss: what a block sees, the gradient, and that it is the decoding drafter that is trained.

Letters: R rows, T text length, A anchors, B block_size, H query heads, K key/value heads, d head_dim.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Loaded, golden_pair
from torch import Tensor

from bridge.views import Params, take_params
from torch_dflash.block import LIKELIEST, DrafterFunctions
from torch_dflash.decode import make_state
from torch_dflash.models.drafter import Drafter
from torch_dflash.pair import load_drafter
from torch_dflash.state import Capacity
from torch_dflash.train.batches import Batch
from torch_dflash.train.features import signal_function
from torch_dflash.train.loss import block_hidden, block_loss, lower_drafter, packed_attention
from torch_dflash.train.objective import (
    ABSENT,
    Frozen,
    Objective,
    Subset,
    Teacher,
    dynamic_weights,
    labels_behind,
)

GAMMA = 2.0
EXPONENTIAL = Objective("exponential", GAMMA)
ANCHORS = np.array([[2, 5, 9], [1, 4, 4]], np.int32)
USED = np.array([[True, True, True], [True, True, False]])
LENGTHS = np.array([12, 7], np.int32)


def batch_of(vocab_size: int, width: int = 12) -> Batch:
    ids = np.random.default_rng(3).integers(0, vocab_size - 1, (2, width)).astype(np.int32)
    return Batch(jnp.asarray(ids), jnp.asarray(LENGTHS), jnp.asarray(ANCHORS), jnp.asarray(USED))


def features_of(loaded: Loaded, width: int = 12) -> np.ndarray:
    size = loaded.drafter.fc.in_features
    return np.random.default_rng(4).standard_normal((2, width, size)).astype(np.float32)


def frozen_of(loaded: Loaded) -> Frozen:
    params = loaded.pair.params["target"]
    return Frozen(params["embed_tokens.weight"], params["lm_head.weight"])


def lowered_of(loaded: Loaded) -> tuple[DrafterFunctions, Params]:
    config, module = load_drafter(loaded.folder / "draft", torch.float32)
    return lower_drafter(module, config), take_params(module)


def visible(query: int, key: int, width: int, size: int, anchors: np.ndarray) -> bool:
    """The rule, for one noise token and one of [context, noise]."""
    block = query // size
    return key < anchors[block] if key < width else (key - width) // size == block


def test_a_block_sees_the_context_before_its_anchor_and_itself():
    rows, width, count, size, kv_heads, groups = 2, 7, 3, 3, 2, 2
    anchors = np.array([[0, 3, 7], [1, 1, 6]], np.int32)
    total = width + count * size
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((rows, count * size, n, total)) for n in (kv_heads * groups, kv_heads))
    context_key = rng.standard_normal((rows, width, kv_heads, total))
    one_hot = np.broadcast_to(np.eye(total)[:, None], (rows, total, kv_heads, total))  # the output is the weights
    arrays = (query, key, one_hot[:, width:], context_key, one_hot[:, :width])
    weights = packed_attention(*(jnp.asarray(x, jnp.float32) for x in arrays), jnp.asarray(anchors))
    for row in range(rows):
        for at in range(count * size):
            wanted = [visible(at, k, width, size, anchors[row]) for k in range(total)]
            for head in range(kv_heads * groups):
                seen = np.asarray(weights[row, at, head])
                assert [bool(w > 0) for w in seen] == wanted, (row, at, head)
                np.testing.assert_allclose(seen.sum(), 1, rtol=1e-5)


def test_attention_weights_are_a_softmax_of_scaled_products():
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((1, 2, n, 4)).astype(np.float32) for n in (4, 2, 2))
    context_key, context_value = rng.standard_normal((2, 1, 5, 2, 4)).astype(np.float32)
    anchors = np.array([[3]], np.int32)
    out = packed_attention(*(jnp.asarray(x) for x in (query, key, value, context_key, context_value, anchors)))
    for at in range(2):
        for head in range(4):
            keys = np.concatenate([context_key[0, :3, head // 2], key[0, :, head // 2]])
            values = np.concatenate([context_value[0, :3, head // 2], value[0, :, head // 2]])
            weights = np.exp(keys @ query[0, at, head] / 2)
            np.testing.assert_allclose(out[0, at, head], weights @ values / weights.sum(), rtol=2e-5, atol=1e-6)


def eager_block(drafter: Drafter, features: Tensor, noise: Tensor, anchor: int) -> Tensor:
    """One block by itself, as the paper has it: no packing, no padding. -> normed hidden [1,B,E]"""
    keys, values = drafter.absorb(features[None, :anchor], torch.arange(anchor)[None])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, _: Any) -> tuple[Tensor, Any]:
        key, value = torch.cat([keys[layer], k], dim=1), torch.cat([values[layer], v], dim=1)
        groups = q.shape[2] // k.shape[2]
        key, value = (x.repeat_interleave(groups, dim=2).transpose(1, 2) for x in (key, value))
        return F.scaled_dot_product_attention(q.transpose(1, 2), key, value).transpose(1, 2), None

    return drafter(noise, torch.arange(anchor, anchor + noise.shape[1])[None], attend, None)


def teacher_of(vocab_size: int, count: int = 3, width: int = 12) -> Teacher:
    """Made up: some tokens and how likely they are, not adding up to 1."""
    rng = np.random.default_rng(5)
    ids = rng.random((2, width, vocab_size)).argsort(axis=-1)[..., :count].astype(np.int32)
    shares = rng.random((2, width, count)) / count
    return Teacher(jnp.asarray(ids), jnp.asarray(np.log(shares), jnp.float32))


def eager_weights(objective: Objective, log_right: Tensor) -> Tensor:
    """Of the positions of one block. log_right [n]: the drafter's log-probability of each right token."""
    if objective.weights == "exponential":
        return torch.exp(-torch.arange(len(log_right)) / objective.gamma)
    smoothed = 0.5 * log_right.exp().detach() + 0.5
    return torch.stack([sum(smoothed[: m + 1].prod() for m in range(j, len(smoothed))) for j in range(len(smoothed))])


def eager_loss(loaded: Loaded, drafter: Drafter, features: Tensor, batch: Batch, objective: Objective) -> Tensor:
    """The same loss, one block after the other, for torch's own autograd."""
    size, ids = loaded.config.block_size, torch.from_numpy(np.array(batch.token_ids)).long()
    teacher = [torch.from_numpy(np.array(x)) for x in jax.tree.leaves(teacher_of(12))]
    total, divisor = torch.zeros(()), 0.0
    for row, anchor in zip(*np.nonzero(USED), strict=True):
        at = int(ANCHORS[row, anchor])
        noise_ids = torch.tensor([[int(ids[row, at]), *[loaded.config.mask_token_id] * (size - 1)]])
        hidden = eager_block(drafter, features[row], loaded.target.embed(noise_ids), at)
        end = min(at + size, int(LENGTHS[row]))
        log_probs = loaded.target.logits(hidden)[0, 1 : end - at].log_softmax(dim=-1)
        hard = log_probs.gather(1, ids[row, at + 1 : end, None])[:, 0]
        token_ids, shares = (held[row, at : end - 1] for held in teacher)
        soft = (log_probs.gather(1, token_ids.long()) * shares.softmax(dim=-1)).sum(dim=-1)
        weights = eager_weights(objective, hard)
        total = total - (weights * ((1 - objective.distill) * hard + objective.distill * soft)).sum()
        divisor += weights.sum().item() if objective.weights == "exponential" else 1
    return total / divisor


@pytest.mark.parametrize(
    "objective",
    [EXPONENTIAL, Objective("dynamic", GAMMA), Objective("exponential", GAMMA, 0.3)],
)
def test_gradient_is_that_of_eager_torch(tiny: Loaded, objective: Objective):
    batch, features = batch_of(12), features_of(tiny)
    _, eager = load_drafter(tiny.folder / "draft", torch.float32)
    wanted = eager_loss(tiny, eager.requires_grad_(True), torch.from_numpy(features), batch, objective)
    wanted.backward()
    lowered, params = lowered_of(tiny)

    def loss(params: Any) -> jax.Array:
        data = jnp.asarray(features), batch, None, teacher_of(12) if objective.distill else None
        return block_loss(lowered, objective, params, frozen_of(tiny), *data)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    for name, parameter in eager.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(gradient[name], parameter.grad.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)


def test_padding_and_unused_anchors_change_nothing(tiny: Loaded):
    batch, features = batch_of(12), features_of(tiny)
    lowered, params = lowered_of(tiny)
    frozen = frozen_of(tiny)
    spoiled = replace(
        batch,
        token_ids=batch.token_ids.at[1, 7:].set(3),
        anchors=batch.anchors.at[1, 2].set(0),
    )
    garbage = features.copy()
    garbage[1, 7:] = 1e3
    one, _ = block_loss(lowered, EXPONENTIAL, params, frozen, jnp.asarray(features), batch, None)
    two, _ = block_loss(lowered, EXPONENTIAL, params, frozen, jnp.asarray(garbage), spoiled, None)
    np.testing.assert_array_equal(one, two)


def test_a_subset_that_is_the_whole_vocabulary_changes_nothing(tiny: Loaded):
    batch, features = batch_of(12), jnp.asarray(features_of(tiny))
    lowered, params = lowered_of(tiny)
    order = np.random.default_rng(0).permutation(12).astype(np.int32)
    every = Subset(jnp.asarray(order), jnp.asarray(np.argsort(order).astype(np.int32)))
    one, first = block_loss(lowered, EXPONENTIAL, params, frozen_of(tiny), features, batch, None)
    two, second = block_loss(lowered, EXPONENTIAL, params, frozen_of(tiny), features, batch, every)
    np.testing.assert_allclose(one, two, rtol=1e-6)
    np.testing.assert_allclose(first.tau, second.tau)


def test_teachers_tokens_outside_the_subset_are_left_out(tiny: Loaded):
    """As if the teacher had not named them; where it named no other, the hard token counts alone."""
    batch, features = batch_of(12), jnp.asarray(features_of(tiny))
    lowered, params = lowered_of(tiny)
    ids = np.unique(np.asarray(batch.token_ids)[np.arange(12) < LENGTHS[:, None]]).astype(np.int32)
    absent = sorted(set(range(12)) - set(ids.tolist()))
    index = np.full(12, ABSENT, np.int32)
    index[ids] = np.arange(len(ids))
    some = Subset(jnp.asarray(ids), jnp.asarray(index))

    def loss(distill: float) -> Callable[[Teacher], jax.Array]:
        objective = Objective("exponential", GAMMA, distill)
        data = frozen_of(tiny), features, batch, some
        return jax.jit(lambda teacher: block_loss(lowered, objective, params, *data, teacher)[0])

    def teaching(*tokens: int) -> Teacher:
        ids = jnp.broadcast_to(jnp.array(tokens, jnp.int32), (2, 12, 2))
        return Teacher(ids, jnp.broadcast_to(jnp.array([-1.0, -2.0]), ids.shape))

    known, soft = int(ids[1]), loss(1.0)
    alone, hard = float(soft(teaching(known, known))), float(loss(0.0)(teaching(known, known)))
    assert soft(teaching(known, absent[0])) == pytest.approx(alone, rel=1e-6)
    assert soft(teaching(absent[0], absent[0])) == pytest.approx(hard, rel=1e-6)
    assert alone != pytest.approx(hard, rel=1e-3)


def test_dynamic_weights_are_the_worth_of_a_position():
    """The closed form of arXiv:2605.18810: sums of products of smoothed probabilities, positions outside count none."""
    right = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.6, 0.2, 0.9]])
    inside = jnp.array([[True] * 3, [True] * 3, [True, True, False]])
    wanted = [[3, 2, 1], [0.875, 0.375, 0.125], [0.8 + 0.8 * 0.6, 0.8 * 0.6, 0]]
    np.testing.assert_allclose(dynamic_weights(right, inside), wanted, rtol=1e-6)


def test_measures_of_a_batch(tiny: Loaded):
    """Acceptance falls with the position and adds up to tau; both come from the guesses of used anchors alone."""
    batch, features = batch_of(12), jnp.asarray(features_of(tiny))
    lowered, params = lowered_of(tiny)
    frozen = frozen_of(tiny)
    hidden = block_hidden(lowered, params, frozen.embedding, features, batch.token_ids, batch.anchors)[:, :, 1:]
    labels, inside = labels_behind(batch, 3)
    guesses = np.asarray((hidden @ frozen.head.T).argmax(axis=-1))
    ids = batch.token_ids.at[0, 3].set(int(guesses[0, 0, 0]))  # anchor 2: its first guess is right
    ids = ids.at[0, 6].set((int(guesses[0, 1, 0]) + 1) % 11).at[0, 7].set(int(guesses[0, 1, 1]))  # anchor 5: its second
    easy = replace(batch, token_ids=ids)
    labels, inside = labels_behind(easy, 3)
    right = (guesses == np.asarray(labels)) & np.asarray(inside)
    steps = right[USED]
    _, measures = block_loss(lowered, EXPONENTIAL, params, frozen, features, easy, None)
    assert steps[:, 0].any() and (steps[:, 1] & ~steps[:, 0]).any()
    np.testing.assert_allclose(measures.acceptance, np.cumprod(steps, axis=1).mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(measures.tau, 1 + np.cumprod(steps, axis=1).sum(axis=1).mean(), rtol=1e-6)


def test_labels_are_the_tokens_behind_the_anchor():
    batch = replace(batch_of(12), token_ids=jnp.arange(24).reshape(2, 12))
    labels, inside = labels_behind(batch, 3)
    assert labels[0, 1].tolist() == [6, 7, 8]
    assert inside[0].tolist() == [[True] * 3, [True] * 3, [True, True, False]]
    assert inside[1].tolist() == [[True] * 3, [True, True, False], [False] * 3]
    assert labels[1, 0].tolist() == [14, 15, 16]


def test_training_sees_the_blocks_that_decoding_sees():
    """Features, context, positions, noise: the training forward of a trained pair proposes what the step proposes."""
    pair = golden_pair("trained-bytes")
    assert pair.drafter is not None
    config, (target, params) = pair.drafter.config, (pair.target, pair.params)
    text = np.frombuffer(b"def add(self, other):\n    return self.value + other.value\n", np.uint8)
    ids = jnp.asarray(text[None].astype(np.int32))
    anchors = jnp.array([[4, 17, 30]], jnp.int32)
    features = signal_function(target, config.target_layer_ids)(params["target"], ids)[0]
    lowered = pair.drafter
    embedding = params["target"]["embed_tokens.weight"]
    hidden = jax.jit(partial(block_hidden, lowered))(params["drafter"], embedding, features, ids, anchors)
    trained = target.logits(params["target"], hidden[0, :, 1:]).argmax(axis=-1)

    proposer = pair.proposer("dflash", None)
    prefill, propose = jax.jit(proposer.prefill), jax.jit(partial(proposer.draft, guess=LIKELIEST))
    for a, anchor in enumerate(anchors[0].tolist()):
        state = make_state(target, proposer, Capacity.whole(1, 1, 64), pair.dtype)
        tables, start, num_new = jnp.array([[1]], jnp.int32), jnp.array([0], jnp.int32), jnp.array([anchor], jnp.int32)
        draft = prefill(params, state.draft, tables, features, ids, start, num_new)
        state = replace(state, draft=draft, anchor=ids[0, anchor : anchor + 1], committed_len=num_new)
        assert propose(params, state, tables)[0][0].tolist() == trained[a].tolist()
