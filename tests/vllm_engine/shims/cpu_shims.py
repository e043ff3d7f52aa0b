"""What vllm-tpu and tpu-inference 0.26 need in order to run on CPU JAX. For the engine suite only.

Nothing of torch-dflash is changed here. The ragged paged attention kernels of tpu-inference, which only a TPU can run,
are replaced by jnp on the same pages.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch_dflash.vllm.after_import import AfterImport

KERNELS = "tpu_inference.kernels.ragged_paged_attention.v3."
HBM = 4 << 30


def install() -> None:
    """Mend what is imported at once, and see to what will be imported."""
    _name_torchvision_ops()
    _import_torchax()
    _drop_tpu_options()
    _keep_storages()
    sys.meta_path.insert(0, AfterImport(CHANGES))


def _name_torchvision_ops() -> None:
    """The index's torchvision lacks its compiled operators beside the CPU build of torch; it only names two."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: list[Any] = []  # a Library takes its definitions along when it goes


def _import_torchax() -> None:
    """torchax 0.0.13 beside torch 2.13; see bridge/torchax_import.py."""
    from bridge.torchax_import import forget_removed, removed_overloads_named

    with removed_overloads_named():
        import torchax
        import torchax.amp
        import torchax.decompositions
    forget_removed(torchax.amp.autocast_policy)


def _drop_tpu_options() -> None:
    """jax.jit without compiler options that only the TPU's compiler knows."""
    import jax

    jit = jax.jit

    def jit_here(*args: Any, **keywords: Any) -> Any:
        options = keywords.get("compiler_options")
        if options:
            keywords["compiler_options"] = {k: v for k, v in options.items() if not k.startswith("xla_tpu_")}
        return jit(*args, **keywords)

    jax.jit = jit_here


def _keep_storages() -> None:
    """Weights that have been handed over are freed by a resize to nothing; on CPU JAX may share their memory."""
    import torch

    resize = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda self, size: self if size == 0 else resize(self, size)


def _change_utils(module: Any) -> None:
    """A mesh of devices without coordinates, and an answer about their memory."""
    import jax
    import numpy as np

    def make_mesh(shape: Any, names: Any, *, devices: Any = None) -> Any:
        devices = jax.devices() if devices is None else devices
        auto = (jax.sharding.AxisType.Auto,) * len(shape)
        return jax.sharding.Mesh(np.array(devices).reshape(shape), names, axis_types=auto)

    module.make_optimized_mesh = make_mesh
    module.hbm_usage_bytes = lambda devices: [(0, HBM) for _ in devices]


def ragged_attention(side_by_side: bool) -> Callable[..., Any]:
    """tpu-inference's ragged paged attention in jnp. side_by_side: a head's key and value share 128 lanes."""
    import jax.numpy as jnp

    def unpack(pages: Any, heads: int, dim: int) -> tuple[Any, Any]:  # [..., n, g, w]
        flat = pages.reshape(*pages.shape[:-3], -1, pages.shape[-1])
        if side_by_side:
            return flat[..., :heads, :dim], flat[..., :heads, dim : 2 * dim]
        return flat[..., 0 : 2 * heads : 2, :dim], flat[..., 1 : 2 * heads : 2, :dim]

    def pack(key: Any, value: Any, cache: Any) -> Any:  # [T,K,d]
        tokens, heads, dim = key.shape
        flat = jnp.zeros((tokens, cache.shape[2] * cache.shape[3], cache.shape[4]), cache.dtype)
        if side_by_side:
            flat = flat.at[:, :heads, :dim].set(key).at[:, :heads, dim : 2 * dim].set(value)
        else:
            flat = flat.at[:, 0 : 2 * heads : 2, :dim].set(key).at[:, 1 : 2 * heads : 2, :dim].set(value)
        return flat.reshape(tokens, *cache.shape[2:])

    def attention(
        queries: Any,
        keys: Any,
        values: Any,
        cache: Any,
        kv_lens: Any,
        page_indices: Any,
        cu_q_lens: Any,
        distribution: Any,
        *,
        sm_scale: float = 1.0,
        sliding_window: int | None = None,
        use_causal_mask: bool = True,
        update_kv_cache: bool = True,
        **others: Any,
    ) -> tuple[Any, Any]:
        assert use_causal_mask and update_kv_cache
        assert not any(value is not None for value in others.values()), others
        tokens, rows, page_size = queries.shape[0], kv_lens.shape[0], cache.shape[1]
        tables = page_indices.reshape(rows, -1)
        at = jnp.arange(tokens)
        row = jnp.minimum((cu_q_lens[1:, None] <= at).sum(0), rows - 1)
        real = (at < cu_q_lens[jnp.minimum(distribution[2], rows)]) & (row < distribution[2])
        position = kv_lens[row] - (cu_q_lens[row + 1] - at)
        slot = tables[row, jnp.clip(position // page_size, 0, tables.shape[1] - 1)] * page_size + position % page_size
        slot = jnp.where(real, slot, cache.shape[0] * page_size)
        flat = cache.reshape(-1, *cache.shape[2:]).at[slot].set(pack(keys, values, cache), mode="drop")
        cache = flat.reshape(cache.shape)
        heads, dim = keys.shape[1:]
        seen = cache[tables].reshape(rows, -1, *cache.shape[2:])
        key, value = (part.astype(jnp.float32)[row] for part in unpack(seen, heads, dim))
        grouped = queries.reshape(tokens, heads, -1, dim).astype(jnp.float32)
        scores = jnp.einsum("tkgd,tnkd->tkgn", grouped, key) * sm_scale
        distance = position[:, None] - jnp.arange(key.shape[1])
        visible = (distance >= 0) & (distance < (sliding_window or 1 << 30))
        scores = jnp.where(visible[:, None, None], scores, -1e30)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        out = jnp.einsum("tkgn,tnkd->tkgd", weights / weights.sum(-1, keepdims=True), value)
        return out.reshape(queries.shape).astype(queries.dtype), cache

    return attention


def _change_kernel(module: Any) -> None:
    module.ragged_paged_attention = ragged_attention(side_by_side=False)


def _change_narrow_kernel(module: Any) -> None:
    module.ragged_paged_attention_hd64 = ragged_attention(side_by_side=True)


CHANGES: dict[str, Callable[[Any], None]] = {
    "tpu_inference.utils": _change_utils,
    KERNELS + "kernel": _change_kernel,
    KERNELS + "kernel_hd64": _change_narrow_kernel,
}
