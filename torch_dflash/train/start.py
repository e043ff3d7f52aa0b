"""What a run begins with: a warm-started drafter of either kind, its loss, the trainer and the first state."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from jax.sharding import Mesh

from bridge.views import Params, take_params
from torch_dflash.config import DrafterConfig, Eagle3Config, TargetConfig
from torch_dflash.config_reader import check_pair, read_drafter_config
from torch_dflash.errors import InputError
from torch_dflash.hub import resolve_draft
from torch_dflash.models.drafter import Drafter
from torch_dflash.pair import Pair, load_drafter
from torch_dflash.propose_eagle import lower_eagle3
from torch_dflash.train.batches import Data
from torch_dflash.train.eagle_loss import GAMMA, chain_loss
from torch_dflash.train.loss import block_loss, check_trainable, lower_drafter, selector_loss
from torch_dflash.train.objective import Frozen, Objective
from torch_dflash.train.recipe import DrafterPlan, Eagle3Plan
from torch_dflash.train.selector import PART, start_maps, with_selector
from torch_dflash.train.texts import free_mask_id, frequent_ids, label_vocabulary
from torch_dflash.train.trainer import Trainer, TrainPlan, TrainState, split_buffers
from torch_dflash.train.warm_start import default_taps, drafter_config, warm_start, widened
from torch_dflash.train.warm_start_eagle import head_config, warm_start_head


def start(
    pair: Pair, data: Data, drafter: DrafterPlan | Eagle3Plan, plan: TrainPlan, mesh: Mesh | None = None
) -> tuple[Trainer, TrainState]:
    """A new drafter for the pair's target, ready to train. Raises InputError for a plan that does not fit it."""
    params = pair.params["target"]
    if isinstance(drafter, DrafterPlan) and plan.start_from is not None:
        config, module = trained_already(plan.start_from, pair.target.config)
        if plan.selector is None:
            return trainer_of(module, config, params, data, plan, mesh)
        config = with_selector(config, plan.selector)
        return trainer_of(widened(module, config), config, params, data, plan, mesh, only_selector=True)
    if isinstance(drafter, DrafterPlan):
        config = settled_config(pair, data, drafter)
        config = config if plan.selector is None else with_selector(config, plan.selector)
        return make_trainer(config, params, data, plan, mesh)
    ids = frequent_ids(data, drafter.draft_vocab_size)
    head = head_config(pair.target.config, drafter.taps, len(ids))
    return make_head_trainer(head, ids, pair.target.config.num_layers, params, plan, mesh)


def settled_config(pair: Pair, data: Data, plan: DrafterPlan) -> DrafterConfig:
    """The plan with what it leaves open: mask token and taps. Raises InputError."""
    target = pair.target.config
    mask = free_mask_id(pair, data) if plan.mask_token_id is None else plan.mask_token_id
    taps = plan.taps or default_taps(target.num_layers, plan.num_taps)
    return drafter_config(target, plan.num_layers, plan.block_size, mask, taps)


def make_trainer(
    config: DrafterConfig, target_params: Params, data: Data, plan: TrainPlan, mesh: Mesh | None = None
) -> tuple[Trainer, TrainState]:
    """A DFlash drafter warm-started from the target's parameters, ready to train."""
    return trainer_of(warm_start(config, target_params), config, target_params, data, plan, mesh)


def trained_already(name: str, target: TargetConfig) -> tuple[DrafterConfig, Drafter]:
    """A drafter to go on from, float32. Raises InputError as `start_folder` does."""
    return load_drafter(start_folder(name, target), torch.float32)


def check_start(target: TargetConfig, plan: TrainPlan) -> None:
    """Raises InputError for a drafter to go on from or a new selector that does not fit the target."""
    if plan.start_from is not None:
        start_folder(plan.start_from, target)
    if plan.selector is None:
        return
    for option, value, field, most in (
        ("--selector-top-k", plan.selector.top_k, "vocab_size", target.vocab_size),
        ("--selector-rank", plan.selector.rank, "hidden_size", target.block.hidden_size),
    ):
        if value > most:
            raise InputError(f"{option} is {value}: the target's {field} is {most}, use at most that")


def start_folder(name: str, target: TargetConfig) -> Path:
    """Of a drafter to go on from: a folder, a hub id or a shipped name. Raises InputError for one that does not fit the
    target or that the loss cannot train; no weight is read."""
    folder = resolve_draft(name)
    config = read_drafter_config(folder)
    check_pair(target.shape, config)
    check_trainable(config)
    return folder


def trainer_of(
    module: Drafter,
    config: DrafterConfig,
    target_params: Params,
    data: Data,
    plan: TrainPlan,
    mesh: Mesh | None,
    only_selector: bool = False,
) -> tuple[Trainer, TrainState]:
    """A DFlash drafter, float32, ready to train; a selector of the plan is new, and its maps are trained.
    only_selector: all else of the drafter stays."""
    lowered = lower_drafter(module, config)
    params, buffers = split_buffers(take_params(module))
    maps: Params = {}
    if plan.selector is not None:
        params = {name: value for name, value in params.items() if not name.startswith(PART)}
        maps = start_maps(plan.selector, config.block.hidden_size, plan.seed)
    stays, trained = (params, maps) if only_selector else ({}, params | maps)
    embedding = target_params["embed_tokens.weight"]
    frozen = Frozen(embedding, target_params.get("lm_head.weight", embedding), stays)
    # A selector alone learns among the candidates that it will have when it decodes. The logits of all tokens are cheap
    # then: they need no gradient.
    vocabulary = None if plan.negatives is None or only_selector else label_vocabulary(data)
    objective = _objective(plan, gamma_of(config.block_size))
    loss = partial(selector_loss if only_selector else block_loss, lowered, objective)
    trainer = Trainer(lowered, loss, frozen, buffers, plan, vocabulary, mesh)
    return trainer, trainer.start(trained)


def make_head_trainer(
    config: Eagle3Config,
    ids: np.ndarray,
    num_layers: int,
    target_params: Params,
    plan: TrainPlan,
    mesh: Mesh | None = None,
) -> tuple[Trainer, TrainState]:
    """An EAGLE-3 head warm-started from the parameters of a target of num_layers layers. ids: what its rows stand
    for."""
    assert plan.ttt_length is not None
    module = warm_start_head(config, ids, target_params, num_layers)
    lowered = lower_eagle3(module, config)
    params, buffers = split_buffers(take_params(module))
    frozen = Frozen(target_params["embed_tokens.weight"], None)
    loss = partial(chain_loss, lowered, _objective(plan, GAMMA), plan.ttt_length)
    trainer = Trainer(lowered, loss, frozen, buffers, plan, None, mesh)
    return trainer, trainer.start(params)


def _objective(plan: TrainPlan, gamma: float) -> Objective:
    return Objective(plan.weights, plan.gamma or gamma, plan.distill)


def gamma_of(block_size: int) -> float:
    """DFlash's decay of the loss weights.  Examples: 8 -> 4, 16 -> 7."""
    return max(1.0, 1 + block_size * 3 / 8)
