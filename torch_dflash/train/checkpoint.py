"""Checkpoints that survive being killed and a full disk: a file is complete under its name, or it is not there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from torch_dflash.errors import InputError


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename. On failure (disk full) `path` is untouched and the part file is removed."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def save_state(path: Path, state: Any, about: Mapping[str, Any]) -> None:
    """All leaves of a pytree in one safetensors file; `about` (JSON) travels in its header: the two cannot disagree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    tensors = {jax.tree_util.keystr(where): np.asarray(leaf, order="C") for where, leaf in leaves}
    write_atomically(path, save(tensors, {"about": json.dumps(about)}))


def load_state(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """The pytree that `save_state` wrote, in the shape of `like`, and what it says about itself."""
    content = path.read_bytes()
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise InputError(f"{path}: is damaged ({error}); remove it to train from the start") from None
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    leaves, shape = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(where) for where, _ in leaves]
    shapes = {name: np.shape(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        raise InputError(f"{path}: belongs to another drafter; use a new folder")
    return jax.tree_util.tree_unflatten(shape, [tensors[name] for name in names]), json.loads(
        header["__metadata__"]["about"]
    )
