"""One training step: AdamW on a lowered drafter. The data of a step depends on nothing but its number."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bridge.views import Params
from torch_dflash.block import DrafterFunctions
from torch_dflash.config import Selector
from torch_dflash.propose_eagle import Eagle3Functions
from torch_dflash.train.batches import Batch, generator
from torch_dflash.train.objective import ABSENT, Frozen, Loss, Measures, Subset, Teacher
from torch_dflash.train.selector import tables

BUFFERS = ("rotary.inv_freq", "d2t")  # part of a module's state, never trained, never cast


@dataclass(frozen=True)
class TrainPlan:
    """How a drafter is trained. weights, gamma, distill: the `Objective`; gamma None: 4, 5, 7 for blocks of 8, 10, 16,
    and weights 0.8^i for an EAGLE-3 head. ttt_length: passes that such a head is unrolled over; None for DFlash.

    start_from: the drafter to go on from; None: one made of the target's layers. selector: DFlash 2's, a new one; of a
    drafter to go on from the other parameters then stay.
    negatives: ids drawn in each step beside those of the texts, for the loss's vocabulary; None: the whole vocabulary.
    compute: "bfloat16" or "float32", for products; parameters and optimiser state are float32.
    """

    steps: int = 2000
    learning_rate: float = 6e-4
    warm_up: float = 0.04
    clip: float = 1.0
    weight_decay: float = 0.01
    weights: str = "exponential"
    gamma: float | None = None
    distill: float = 0.0
    ttt_length: int | None = None
    start_from: str | None = None
    selector: Selector | None = None
    negatives: int | None = 1024
    compute: str = "bfloat16"
    seed: int = 0
    log_every: int = 20
    save_every: int = 200


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that changes. Its step also says which data comes next."""

    params: Params
    optimiser: Any
    step: Array  # int32[]


def make_optimiser(plan: TrainPlan) -> optax.GradientTransformation:
    """Clipping and AdamW; its updates are still to be multiplied by -learning_rate."""
    return optax.chain(
        optax.clip_by_global_norm(plan.clip),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(plan.weight_decay),
    )


def learning_rate(plan: TrainPlan, step: Array, steps: Array) -> Array:
    """Warm-up, then cosine to zero at `steps`; which is an argument, so that its value costs no compilation."""
    warm_up = jnp.maximum(steps * plan.warm_up, 1.0)
    done = (step - warm_up) / jnp.maximum(steps - warm_up, 1.0)
    falling = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0)))
    return plan.learning_rate * jnp.minimum((step + 1) / warm_up, falling)


def split_buffers(params: Params) -> tuple[Params, Params]:
    """(trained parameters, buffers)"""
    trained = {name: value for name, value in params.items() if name not in BUFFERS}
    return trained, {name: value for name, value in params.items() if name in BUFFERS}


@dataclass(frozen=True, eq=False)
class Trainer:
    """What never changes in a run. drafter: what `loss` trains, lowered.

    vocabulary: int32, ascending, every id that occurs as a label; None: the loss is over all ids.
    mesh: the rows of a batch are spread over its axis "data"; None for one device.
    """

    drafter: DrafterFunctions | Eagle3Functions
    loss: Loss
    frozen: Frozen
    buffers: Params
    plan: TrainPlan
    vocabulary: np.ndarray | None
    mesh: Mesh | None = None

    def start(self, params: Params) -> TrainState:
        """The state before the first step. `params` are the trained ones, float32; they are copied."""
        params = {name: jnp.array(value, jnp.float32, copy=True) for name, value in params.items()}
        state = TrainState(params, make_optimiser(self.plan).init(params), jnp.int32(0))
        # Placed explicitly: an unplaced first state would compile the step twice.
        return jax.device_put(state, self._everywhere)

    def whole(self, params: Params) -> Params:
        """All of the drafter's parameters, from the trained ones."""
        return self._merged(params, self._frozen)

    def _merged(self, params: Params, frozen: Frozen) -> Params:
        return tables(params, frozen.embedding) | frozen.drafter | self.buffers

    @functools.cached_property
    def stays(self) -> str:
        """Says of which values the drafter's parameters are that are not trained; empty where all are."""
        held = {name: np.asarray(value) for name, value in sorted(self.frozen.drafter.items())}
        return hashlib.sha256(safetensors.numpy.save(held)).hexdigest()[:16] if held else ""

    @property
    def _everywhere(self) -> Any:
        return jax.devices()[0] if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def step(
        self, state: TrainState, number: int, steps: int, features: Any, batch: Batch, teacher: Teacher | None
    ) -> tuple[TrainState, Measures]:
        """Step `number` of `steps`. `state` is donated. Does not wait for the device."""
        if self.mesh is not None:
            spread = NamedSharding(self.mesh, PartitionSpec("data"))
            batch, features, teacher = jax.device_put((batch, features, teacher), spread)
        subset = self.subset(number)
        return self._compiled(state, np.float32(steps), self._frozen, features, batch, subset, teacher)

    def subset(self, number: int) -> Subset | None:
        """The label vocabulary and, beside it, ids drawn afresh for each step."""
        if self.vocabulary is None:
            return None
        others, count = self._other_ids, min(self.plan.negatives or 0, len(self._other_ids))
        drawn = generator(self.plan.seed, 3, number).choice(others, count, replace=False)
        ids = np.concatenate([self.vocabulary, drawn])
        index = np.full(self.frozen.embedding.shape[0], ABSENT, np.int32)
        index[ids] = np.arange(len(ids))
        return Subset(ids, index)

    @functools.cached_property
    def _other_ids(self) -> np.ndarray:
        assert self.vocabulary is not None
        return np.setdiff1d(np.arange(self.frozen.embedding.shape[0], dtype=np.int32), self.vocabulary)

    @functools.cached_property
    def _frozen(self) -> Frozen:
        return self.frozen if self.mesh is None else jax.device_put(self.frozen, self._everywhere)

    def cast_loss(self, params: Params, frozen: Frozen, features: Any, *data: Any) -> tuple[Array, Measures]:
        """The loss, with products in the plan's dtype. `params` are the trained ones."""
        params, frozen, features = jax.tree.map(lambda x: x.astype(self.plan.compute), (params, frozen, features))
        return self.loss(self._merged(params, frozen), frozen, features, *data)

    @functools.cached_property
    def _compiled(self) -> Callable[..., tuple[TrainState, Measures]]:
        optimiser = make_optimiser(self.plan)

        def step(state: TrainState, steps: Array, *data: Any) -> tuple[TrainState, Measures]:
            (_, measures), gradient = jax.value_and_grad(self.cast_loss, has_aux=True)(state.params, *data)
            updates, memory = optimiser.update(gradient, state.optimiser, state.params)
            rate = learning_rate(self.plan, state.step, steps)
            params = jax.tree.map(lambda old, update: old - rate * update, state.params, updates)
            return TrainState(params, memory, state.step + 1), measures

        return jax.jit(step, donate_argnums=0)
