"""A target and its drafter, loaded and lowered."""

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import torch
from jax import Array

from bridge.platform import Platform, own_platform
from bridge.views import Params, take_tensors, to_jax
from torch_dflash.config import ZLAB, DrafterConfig, Layout, TargetConfig
from torch_dflash.config_reader import check_pair, read_drafter_config, read_target_config
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.hub import resolve_draft, resolve_target
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target
from torch_dflash.propose import AllParams, DFlash, DrafterFunctions, Plain, lower_drafter
from torch_dflash.sharding import axes_of, check_divides
from torch_dflash.stacked import stack_layers
from torch_dflash.tokenizer import load_tokenizer
from torch_dflash.verify import TargetFunctions, lower_target
from torch_dflash.weights import load_weights, tensor_names

log = logging.getLogger("torch_dflash")

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Pair:
    """What `generate` needs: functions, their parameters, a tokenizer. `drafter` is None for a target alone.

    `compiled` remembers what has been compiled for this pair, so that warm-up happens once.
    """

    target: TargetFunctions
    drafter: DrafterFunctions | None
    params: AllParams
    tokenizer: Any
    dtype: Any
    compiled: set[Hashable] = field(default_factory=set)

    def proposer(self, method: str | None, num_drafts: int | None) -> DFlash | Plain:
        """The proposer of a method: "dflash", "plain", or None for dflash where there is a drafter."""
        if method not in (None, "dflash", "plain"):
            raise InputError(f'method {method!r} is unknown: use "dflash" or "plain"')
        if method == "plain" or (method is None and self.drafter is None):
            if num_drafts is not None:
                raise InputError(f"num_drafts is {num_drafts!r}: plain decoding drafts nothing, leave it out")
            return Plain()
        if self.drafter is None:
            raise InputError('method "dflash" needs a drafter: load one with load_pair(target, draft), or use "plain"')
        block_size = self.drafter.config.block_size
        if num_drafts is None:
            num_drafts = block_size - 1
        why = f"a block of {block_size} is the anchor and its drafts"
        num_drafts = checked_integer(num_drafts, "num_drafts", 1, block_size - 1, why)
        return DFlash(self.drafter, self.target, num_drafts)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Log what is being done (DEBUG, while it runs) and how long it took (INFO)."""
    log.debug("%s ...", what)
    begin = time.perf_counter()
    yield
    log.info("%s (%.1f s)", what, time.perf_counter() - begin)


def load_target(folder: Path, dtype: torch.dtype) -> tuple[TargetConfig, Target]:
    """The target of a checkpoint folder, as an eager torch module."""
    config = read_target_config(folder)
    return config, _filled(partial(Target, config), folder, dtype)


def load_drafter(folder: Path, dtype: torch.dtype) -> tuple[DrafterConfig, Drafter]:
    """The drafter of a checkpoint folder, as an eager torch module."""
    config = read_drafter_config(folder)
    # A checkpoint with a head of its own may leave out the embedding, which is the target's then.
    own_head = config.draft_vocab_size is not None
    own_embedding = own_head and "embed_tokens.weight" in tensor_names(folder, config.layout)
    module = _filled(partial(Drafter, config, own_embedding), folder, dtype, config.layout)
    _check_draft_ids(module, config, folder)
    return config, module


def _filled(make: Callable[[], ModuleT], folder: Path, dtype: torch.dtype, layout: Layout = ZLAB) -> ModuleT:
    """A module with the folder's weights. Made without memory of its own: each tensor is allocated as it is read."""
    with torch.device("meta"):
        module = make()
    load_weights(module, folder, dtype, layout)
    return module.eval()


def _check_draft_ids(module: Drafter, config: DrafterConfig, folder: Path) -> None:
    """Every row of a reduced head must stand for a token of its own."""
    if config.draft_vocab_size is None or config.vocab_size is None:
        return
    ids = torch.arange(config.draft_vocab_size) + module.d2t.long()
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < len(ids):
        reason = f"row + d2t[row] must be distinct ids 0..{config.vocab_size - 1}"
        raise InputError(f"{folder}: tensor d2t gives ids {ids.min()}..{ids.max()}; {reason}, download it again")


def share_embedding(drafter: Drafter, target: Target) -> None:
    """Let go of a drafter's own embedding if it is the target's, bit for bit: most checkpoints hold such a copy."""
    own = drafter.embed_tokens
    if own is not None and torch.equal(own.weight, target.embed_tokens.weight):
        drafter.embed_tokens = None


def load_pair(
    target: str | Path = "default",
    draft: str | Path | None = "default",
    dtype: str = "float32",
    *,
    block_size: int | None = None,
    platform: Platform | None = None,
) -> Pair:
    """Load and lower a target and a drafter: folders, Hugging Face hub ids, or "default" for the shipped pair.

    `draft=None` loads the target alone. `dtype` is "float32" or "bfloat16". `block_size` runs the drafter with a
    smaller block than it was trained for (anchor included); larger ones are refused. `platform`: what it runs on,
    `own_platform()` by default; see `platform_over` for several devices. Raises InputError for anything that does not
    fit.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown: use float32 or bfloat16")
    if block_size is not None and draft is None:
        raise InputError(f"block_size is {block_size!r}: there is no drafter to run with it, leave it out")
    target_folder = resolve_target(str(target))
    draft_folder = None if draft is None else resolve_draft(str(draft))
    # All of the drafter's config is checked before any weight is read.
    config = None if draft_folder is None else _draft_config(draft_folder, target_folder, block_size)
    platform = own_platform() if platform is None else platform
    check_divides(read_target_config(target_folder), config, platform.model)
    with timed(f"load target {target}, {dtype}"):
        target_config, module = load_target(target_folder, DTYPES[dtype])
    drafter, params = None, dict[str, Params]()
    if draft_folder is not None and config is not None:
        with timed(f"load drafter {draft}, {dtype}"):
            _, draft_module = load_drafter(draft_folder, DTYPES[dtype])
            share_embedding(draft_module, module)
            drafter, params["drafter"] = (
                lower_drafter(draft_module, config),
                _placed(take_tensors(draft_module), platform),
            )
    functions, tensors = lower_target(module, target_config, platform), take_tensors(module)
    params["target"] = _placed(stack_layers(tensors) if platform.stacked else tensors, platform)
    tokenizer = load_tokenizer(target_folder)
    return Pair(functions, drafter, params, tokenizer, jnp.dtype(dtype))


def _placed(tensors: dict[str, torch.Tensor], platform: Platform) -> Params:
    """The tensors on the devices, each its part. `tensors` is emptied on the way."""
    names = list(tensors)
    return {name: _place(name, tensors.pop(name), platform) for name in names}


def _place(name: str, tensor: torch.Tensor, platform: Platform) -> Array:
    return to_jax(tensor, platform.sharding(*axes_of(name, tensor.ndim)))


def _draft_config(folder: Path, target_folder: Path, block_size: int | None) -> DrafterConfig:
    """The drafter's config, fit for the target, with the block size to be used."""
    config = read_drafter_config(folder)
    check_pair(read_target_config(target_folder), config)
    if block_size is None:
        return config
    why = f"the drafter was trained for {config.block_size}"
    return replace(config, block_size=checked_integer(block_size, "block_size", 2, config.block_size, why))
