"""The programs of a pair compiled for TPU chips that are not there: shapes in, no weights.

Letters: R rows, T tokens of a prompt chunk, N steps of a dispatch.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.platform import ROWS, Platform
from bridge.positions import pages_for
from bridge.views import Params, take_tensors
from torch_dflash.block import lower_drafter
from torch_dflash.config import DrafterConfig, TargetConfig
from torch_dflash.decode import decode_program, prefill_program, state_shapes
from torch_dflash.engine import PAGE_SIZE, PREFILL_CHUNK
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target
from torch_dflash.options import NOTHING, row_options
from torch_dflash.pair import DTYPES, Pair
from torch_dflash.propose import Proposer
from torch_dflash.sampling import choose_greedily
from torch_dflash.sharding import axes_of, check_divides
from torch_dflash.stacked import stack_layers, turn
from torch_dflash.state import Capacity, Chunk, Until
from torch_dflash.verify import lower_target


def shapes_only(target: TargetConfig, draft: DrafterConfig | None, dtype: str, platform: Platform) -> Pair:
    """A pair whose parameters are shapes, each with the devices that would hold it. Raises InputError when the
    mesh does not divide it."""
    check_divides(target, draft, platform.model)
    with torch.device("meta"):
        module = Target(target)
        draft_module = None if draft is None else Drafter(draft)
    functions, tensors = lower_target(module, target, platform), _cast(module, DTYPES[dtype])
    params = {"target": _shapes(stack_layers(tensors) if platform.stacked else tensors, platform)}
    drafter = None
    if draft is not None and draft_module is not None:
        drafter = lower_drafter(draft_module, draft)
        params["drafter"] = _shapes(_cast(draft_module, DTYPES[dtype]), platform)
    return Pair(functions, drafter, params, None, jnp.dtype(dtype))


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters in `dtype`; buffers keep their own, as when they are loaded."""
    cast = {name for name, _ in module.named_parameters()}
    return {name: tensor.to(dtype) if name in cast else tensor for name, tensor in take_tensors(module).items()}


def _shapes(tensors: dict[str, torch.Tensor], platform: Platform) -> Params:
    tensors = turn(tensors) if platform.turned else tensors

    def shape(name: str, tensor: torch.Tensor) -> Any:
        dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
        where = platform.sharding(*axes_of(name, tensor.ndim))
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=where)

    return {name: shape(name, tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Workload:
    """What a program is compiled for. rows: R, of all devices. context: positions that a row may fill. groups:
    data-parallel devices. pages: of one layer and group; None: just enough for all rows."""

    rows: int
    context: int
    groups: int = 1
    pages: int | None = None

    @property
    def capacity(self) -> Capacity:
        whole = Capacity.whole(self.rows, pages_for(self.context, PAGE_SIZE), PAGE_SIZE, groups=self.groups)
        return whole if self.pages is None else replace(whole, num_pages=self.pages)


def lower_decode(pair: Pair, proposer: Proposer, workload: Workload, max_steps: int) -> Any:
    """A dispatch of all rows, up to max_steps steps."""
    platform, rows, pages = pair.target.platform, workload.rows, workload.capacity.pages_per_row
    options = jax.tree.map(lambda part: _ints(platform, part.shape, part.dtype), row_options([NOTHING] * rows, 1, 1))
    program: Any = decode_program(platform)
    return program.lower(
        pair.target,
        proposer,
        choose_greedily,
        max_steps,
        pair.params,
        state_shapes(pair.target, proposer, workload.capacity, pair.dtype),
        _ints(platform, (rows,)),
        _ints(platform, (rows, pages)),
        options,
        jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.int32), Until(1, 1)),
    )


def lower_prefill(pair: Pair, proposer: Proposer, workload: Workload, width: int = PREFILL_CHUNK) -> Any:
    """A prompt chunk of `width` tokens of one row (of each row group)."""
    platform, capacity = pair.target.platform, workload.capacity
    one, r = (platform.data,), platform.data
    options = jax.tree.map(lambda part: _ints(platform, part.shape, part.dtype), row_options([NOTHING] * r, 1, 1))
    program: Any = prefill_program()
    return program.lower(
        pair.target,
        proposer,
        choose_greedily,
        pair.params,
        state_shapes(pair.target, proposer, capacity, pair.dtype),
        _ints(platform, one),
        _ints(platform, (r, capacity.pages_per_row)),
        options,
        _ints(platform, (r, capacity.slots_per_row)),
        _ints(platform, one),
        Chunk(_ints(platform, (r, width)), _ints(platform, one), _ints(platform, one)),
    )


def _ints(platform: Platform, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=platform.sharding(*ROWS))
