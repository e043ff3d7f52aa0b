"""The training loop, with checkpoints from which it goes on bit for bit, and a log."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from torch_dflash.errors import InputError
from torch_dflash.train.batches import Order
from torch_dflash.train.checkpoint import load_state, save_state, write_atomically
from torch_dflash.train.evaluate import HeldOut
from torch_dflash.train.features import FeatureStore
from torch_dflash.train.objective import Measures
from torch_dflash.train.trainer import Trainer, TrainState

CHECKPOINT, LOG = "checkpoint.safetensors", "log.jsonl"
MAY_CHANGE = ("steps", "log_every", "save_every")  # fields of the plan that another start of a run may change


def train(
    trainer: Trainer, state: TrainState, order: Order, store: FeatureStore, steps: int
) -> Iterator[tuple[TrainState, Measures]]:
    """Steps state.step..steps-1; yields after each. Nothing waits for the device in here."""
    for number in range(int(state.step), steps):
        batch, offsets = order.batch(number)
        features = store.gather(offsets, batch.token_ids.shape[1])
        teacher = store.teacher(offsets, batch.token_ids.shape[1]) if trainer.plan.distill else None
        state, measures = trainer.step(state, number, steps, features, batch, teacher)
        yield state, measures


def run(
    trainer: Trainer,
    state: TrainState,
    order: Order,
    store: FeatureStore,
    folder: Path,
    steps: int,
    held_out: HeldOut | None = None,
) -> TrainState:
    """Train to step `steps`, from the folder's checkpoint where there is one; now and then decode held-out prompts.

    May be killed at any moment: the next run repeats what the last checkpoint does not hold, with the same result.
    Raises InputError when a checkpoint cannot be written (disk full), and the one before it stays; and for a folder
    whose checkpoint was trained otherwise.
    """
    state = resume(state, folder, trainer)
    begin, pending, first = time.perf_counter(), [], int(state.step)
    trim_log(folder / LOG, first)
    moved, every = state, trainer.plan
    with tqdm(total=steps, initial=first, desc="train", unit="step", mininterval=1) as bar:
        for number, (moved, measures) in enumerate(train(trainer, state, order, store, steps), first + 1):
            pending.append(measures)
            saving = number == steps or number % every.save_every == 0
            if saving or number % every.log_every == 0:  # a checkpoint never parts the steps of one line
                line = _log(folder / LOG, number, pending, time.perf_counter() - begin)
                bar.set_postfix(loss=line["loss"], tau=line["tau"], refresh=False)
                bar.update(len(pending))
                pending = []
            if held_out is not None and held_out.due(number, steps):
                figures = held_out(trainer.drafter, trainer.whole(moved.params))
                _append(folder / LOG, {"step": number, "held_out": {name: asdict(f) for name, f in figures.items()}})
            if saving:
                _save(folder / CHECKPOINT, moved, number, trainer)
    return moved


def resume(state: TrainState, folder: Path, trainer: Trainer) -> TrainState:
    """The folder's checkpoint, or `state`, whose shape and placement the checkpoint takes. Raises InputError for one
    that another plan made, or that was trained on top of other weights."""
    path = folder / CHECKPOINT
    if not path.exists():
        return state
    held, about = load_state(path, state)
    old, new = about["plan"], asdict(trainer.plan)
    changed = [name for name in new if name not in MAY_CHANGE and old.get(name) != new[name]]
    if changed:
        shown = ", ".join(f"{name} {old.get(name)} (now {new[name]})" for name in changed)
        raise InputError(f"{path}: was trained with {shown}; use the same options, or a new folder")
    if about.get("stays", "") != trainer.stays:
        other = f"other weights than those of --start-from {trainer.plan.start_from}"
        raise InputError(f"{path}: was trained on top of {other}; put those back, or use a new folder")
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), held, state)


def _save(path: Path, state: TrainState, number: int, trainer: Trainer) -> None:
    try:
        save_state(path, state, {"step": number, "plan": asdict(trainer.plan), "stays": trainer.stays})
    except OSError as error:
        reason = f"the checkpoint of step {number} cannot be written ({error.strerror or error})"
        raise InputError(f"{path}: {reason}; the one before it is whole: make room and run again") from None


def trim_log(path: Path, step: int) -> None:
    """Drop the lines behind `step`, which will be written again, and a half-written one."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        kept = [line + "\n" for line in lines if json.loads(line)["step"] <= step]
        write_atomically(path, "".join(kept).encode())


def _log(path: Path, number: int, measures: list[Measures], seconds: float) -> dict[str, Any]:
    """Write one line: means since the line before."""
    mean = jax.tree.map(lambda *values: np.mean(np.stack(values), axis=0), *jax.device_get(measures))
    line = {
        "step": number,
        "seconds": round(seconds, 1),
        "loss": round(float(mean.loss), 4),
        "tau": round(float(mean.tau), 4),
        "accuracy": [round(float(value), 4) for value in mean.accuracy],
        "acceptance": [round(float(value), 4) for value in mean.acceptance],
    }
    _append(path, line)
    return line


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
