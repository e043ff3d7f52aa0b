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
from torch_dflash.block import DrafterFunctions, lower_drafter
from torch_dflash.config import EAGLE3, ZLAB, DrafterConfig, Eagle3Config, Layout, TargetConfig
from torch_dflash.config_eagle import is_eagle3, read_eagle3_config
from torch_dflash.config_reader import check_pair, read_drafter_config, read_target_config
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.hub import resolve_draft, resolve_target
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.eagle3 import Eagle3
from torch_dflash.models.target import Target
from torch_dflash.propose import AllParams, DFlash, Plain
from torch_dflash.propose_eagle import Eagle3Drafts, Eagle3Functions, lower_eagle3
from torch_dflash.sharding import axes_of, check_divides
from torch_dflash.stacked import stack_layers, turn
from torch_dflash.tokenizer import load_tokenizer
from torch_dflash.verify import TargetFunctions, lower_target
from torch_dflash.weights import load_weights, tensor_names

log = logging.getLogger("torch_dflash")

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

EAGLE3_DRAFTS = 2  # what it is served with (Google's comparison, see FACTS): each draft is a pass of its own
MOST_EAGLE3_DRAFTS = 16

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Pair:
    """What `generate` needs: functions, their parameters, a tokenizer. `drafter` is None for a target alone, and an
    EAGLE-3 head for the baseline.

    `compiled` remembers what has been compiled for this pair, so that warm-up happens once.
    """

    target: TargetFunctions
    drafter: DrafterFunctions | Eagle3Functions | None
    params: AllParams
    tokenizer: Any
    dtype: Any
    compiled: set[Hashable] = field(default_factory=set)

    @property
    def method(self) -> str:
        """What the drafter is made for: "dflash" or "eagle3"; "plain" without one."""
        if self.drafter is None:
            return "plain"
        return "eagle3" if isinstance(self.drafter, Eagle3Functions) else "dflash"

    def proposer(self, method: str | None, num_drafts: int | None) -> DFlash | Eagle3Drafts | Plain:
        """The proposer of a method: "dflash", "eagle3", "plain", or None for whatever the drafter is, if there is
        one."""
        if method not in (None, "dflash", "eagle3", "plain"):
            raise InputError(f'method {method!r} is unknown: use "dflash", "eagle3" or "plain"')
        if method == "plain" or (method is None and self.drafter is None):
            if num_drafts is not None:
                raise InputError(f"num_drafts is {num_drafts!r}: plain decoding drafts nothing, leave it out")
            return Plain()
        if self.drafter is None:
            raise InputError(
                f'method "{method}" needs a drafter: load one with load_pair(target, draft), or use "plain"'
            )
        if method not in (None, self.method):
            raise InputError(f'method is "{method}", and the drafter is made for "{self.method}": use that, or "plain"')
        if isinstance(self.drafter, Eagle3Functions):
            drafts = EAGLE3_DRAFTS if num_drafts is None else num_drafts
            return Eagle3Drafts(self.drafter, self.target, checked_integer(drafts, "num_drafts", 1, MOST_EAGLE3_DRAFTS))
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
    if config.draft_vocab_size is not None and config.vocab_size is not None:
        _check_draft_ids(module.d2t, config.vocab_size, folder)
    return config, module


def load_eagle3(folder: Path, target: TargetConfig, dtype: torch.dtype) -> tuple[Eagle3Config, Eagle3]:
    """The EAGLE-3 head of a checkpoint folder, as an eager torch module. Raises InputError."""
    config = read_eagle3_config(folder, target)
    module = _filled(partial(Eagle3, config), folder, dtype, EAGLE3)
    _check_draft_ids(module.d2t, config.vocab_size, folder)
    return config, module


def _filled(make: Callable[[], ModuleT], folder: Path, dtype: torch.dtype, layout: Layout = ZLAB) -> ModuleT:
    """A module with the folder's weights. Made without memory of its own: each tensor is allocated as it is read."""
    with torch.device("meta"):
        module = make()
    load_weights(module, folder, dtype, layout)
    return module.eval()


def _check_draft_ids(d2t: torch.Tensor, vocab_size: int, folder: Path) -> None:
    """Every row of a reduced head must stand for a token of its own."""
    ids = torch.arange(len(d2t)) + d2t.long()
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) < len(ids):
        reason = f"row + d2t[row] must be distinct ids 0..{vocab_size - 1}"
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
            drafter, draft_module = _lowered(draft_folder, config, target_config, module, DTYPES[dtype])
            params["drafter"] = place_weights(take_tensors(draft_module), platform)
    functions, tensors = lower_target(module, target_config, platform), take_tensors(module)
    params["target"] = place_weights(stack_layers(tensors) if platform.stacked else tensors, platform)
    tokenizer = load_tokenizer(target_folder)
    return Pair(functions, drafter, params, tokenizer, jnp.dtype(dtype))


def with_head(pair: Pair, head: str | Path) -> Pair:
    """The pair's target, in the same memory, with an EAGLE-3 head in the drafter's place: a folder or hub id. Raises
    InputError for anything else."""
    folder, target = resolve_draft(str(head)), pair.target.config
    config, platform = read_eagle3_config(folder, target), pair.target.platform
    check_divides(target, config, platform.model)
    with timed(f"load EAGLE-3 head {head}, {pair.dtype.name}"):
        _, module = load_eagle3(folder, target, DTYPES[pair.dtype.name])
        functions = lower_eagle3(module, config)
        params = {"target": pair.params["target"], "drafter": place_weights(take_tensors(module), platform)}
    return replace(pair, drafter=functions, params=params, compiled=set())


def _lowered(
    folder: Path, config: DrafterConfig | Eagle3Config, target_config: TargetConfig, target: Target, dtype: torch.dtype
) -> tuple[DrafterFunctions | Eagle3Functions, torch.nn.Module]:
    """A drafter's functions, and its module with the weights."""
    if isinstance(config, Eagle3Config):
        _, head = load_eagle3(folder, target_config, dtype)
        return lower_eagle3(head, config), head
    _, module = load_drafter(folder, dtype)
    share_embedding(module, target)
    return lower_drafter(module, config), module


def place_weights(tensors: dict[str, torch.Tensor], platform: Platform) -> Params:
    """The tensors on the devices, each its part. `tensors` is emptied on the way."""
    tensors = turn(tensors) if platform.turned else tensors
    names = list(tensors)
    return {name: _place(name, tensors.pop(name), platform) for name in names}


def _place(name: str, tensor: torch.Tensor, platform: Platform) -> Array:
    return to_jax(tensor, platform.sharding(*axes_of(name, tensor.ndim)))


def _draft_config(folder: Path, target_folder: Path, block_size: int | None) -> DrafterConfig | Eagle3Config:
    """The drafter's config, fit for the target, with the block size to be used."""
    target = read_target_config(target_folder)
    if is_eagle3(folder):
        if block_size is not None:
            raise InputError(f"block_size is {block_size}: an EAGLE-3 head has no blocks, leave it out")
        return read_eagle3_config(folder, target)
    config = read_drafter_config(folder)
    check_pair(target.shape, config)
    if block_size is None:
        return config
    why = f"the drafter was trained for {config.block_size}"
    return replace(config, block_size=checked_integer(block_size, "block_size", 2, config.block_size, why))
