"""The stages of training, each resumable: answers, features, training, export. `command.py` calls them."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from bridge.platform import own_platform
from torch_dflash.errors import InputError
from torch_dflash.pair import load_pair
from torch_dflash.train.batches import Order
from torch_dflash.train.checkpoint import write_atomically
from torch_dflash.train.evaluate import make_held_out
from torch_dflash.train.export import export
from torch_dflash.train.features import FeatureStore, cache_features, device_features
from torch_dflash.train.loop import LOG, run, train
from torch_dflash.train.plot import plot_log
from torch_dflash.train.recipe import Recipe
from torch_dflash.train.start import check_start, start
from torch_dflash.train.texts import make_answers, prepare
from torch_dflash.train.trainer import Trainer, TrainState

CALIBRATION_STEPS = 30
TEACHER_SIZE = 8  # the target's tokens that distillation sees at each position


def make_drafter(target: str, groups: Sequence[Sequence[str]], recipe: Recipe, folder: Path) -> Path:
    """All stages in `folder`, from groups (files) of prompts; what is there already is not made again.

    Returns the folder of the finished drafter.
    """
    mesh = make_mesh(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    platform = replace(own_platform(), stacked=False)  # bulk answers keep a cache for each layer
    pair = load_pair(target, None, recipe.training.compute, platform=platform)
    check_start(pair.target.config, recipe.training)  # not after hours of answering
    held_out = make_held_out(pair, recipe.held_out)
    data = prepare(make_answers(pair, groups, recipe, folder), recipe.batches.max_tokens)
    if len(data.lengths) < recipe.batches.rows:
        raise InputError(
            f"{len(data.lengths)} usable answers do not fill a step of {recipe.batches.rows}: lower --rows"
        )
    trainer, state = start(pair, data, recipe.drafter, recipe.training, mesh)
    store: FeatureStore
    params, taps = pair.params["target"], trainer.drafter.config.target_layer_ids
    teacher_size = TEACHER_SIZE if recipe.training.distill else 0
    if recipe.accelerator:
        store = device_features(pair.target, params, taps, data, teacher_size)
    else:
        store = cache_features(pair.target, params, taps, data, folder, teacher_size)
    order = Order(data, recipe.batches)
    steps = settled_steps(trainer, state, order, store, recipe, folder)
    state = run(trainer, state, order, store, folder, steps, held_out)
    eos = pair.target.config.eos_token_ids
    export(trainer.drafter.config, trainer.whole(state.params), folder / "drafter", eos[0] if eos else None)
    plot_log(folder / LOG, folder / "log.png")
    return folder / "drafter"


def make_mesh(recipe: Recipe) -> Mesh | None:
    """The devices that share the rows of a step; None for one. Raises InputError."""
    count, devices = recipe.mesh, jax.devices()
    if not 1 <= count <= len(devices):
        raise InputError(f"--mesh is {count}: this machine has {len(devices)} device(s), use 1..{len(devices)}")
    if recipe.batches.rows % count:
        raise InputError(f"--rows is {recipe.batches.rows}: use a multiple of --mesh, {count}")
    if count == 1:
        return None
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=devices[:count])


def timed_steps(trainer: Trainer, state: TrainState, order: Order, store: FeatureStore, seconds: float) -> int:
    """How many steps fit in `seconds`: some are tried on a copy of the state, which also compiles them."""
    begin = time.perf_counter()
    widths = {order.width_of(step): step for step in range(order.steps_per_epoch)}
    copy = jax.tree.map(lambda x: jnp.array(x, copy=True), state)

    def do(copy: TrainState, step: int) -> TrainState:
        copy = replace(copy, step=copy.step * 0 + step)
        return next(train(trainer, copy, order, store, step + 1))[0]

    for step in widths.values():
        copy = jax.block_until_ready(do(copy, step))
    compiled = time.perf_counter()
    for step in range(CALIBRATION_STEPS):
        copy = do(copy, step)
    jax.block_until_ready(copy)
    now = time.perf_counter()
    return max(CALIBRATION_STEPS, int((seconds - (now - begin)) / ((now - compiled) / CALIBRATION_STEPS)))


def settled_steps(
    trainer: Trainer, state: TrainState, order: Order, store: FeatureStore, recipe: Recipe, folder: Path
) -> int:
    """The number of steps: that of an earlier start of this run, the recipe's, or what the time allows."""
    path = folder / "steps.json"
    if path.exists():
        return int(json.loads(path.read_text())["steps"])
    steps = recipe.training.steps
    if recipe.train_seconds is not None:
        steps = timed_steps(trainer, state, order, store, recipe.train_seconds)
    write_atomically(path, json.dumps({"steps": steps}).encode())
    return steps
