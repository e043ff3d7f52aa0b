"""The crossing between torch and JAX, and the lowering of a torch module to a pure JAX function.

The only file that imports torchax. Its API is not stable; what changes there is mended here.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from torch import nn

from bridge.platform import precision
from bridge.torchax_import import forget_removed, quiet_accelerator, removed_overloads_named, version_line

try:
    with removed_overloads_named():
        import torchax
        import torchax.amp
        import torchax.decompositions
        import torchax.device_module
        from torchax import interop
except (ImportError, AttributeError) as error:
    raise ImportError(f"{version_line()} ({error})") from error

forget_removed(torchax.amp.autocast_policy)
quiet_accelerator(torchax.device_module)

Params = dict[str, Array]
TURNED = ".T"  # ends the name of a parameter whose last two axes are swapped

# functional_call swaps a module's parameters while it is traced, so two traces at a time would corrupt it.
_TRACING = threading.RLock()


def take_rows(table: Array, ids: Array) -> Array:
    """table[ids] along the first axis. On CPU a bf16 table is read as integers: XLA would first widen all of it to f32
    there. Elsewhere the integers would be a copy."""
    if table.dtype != jnp.bfloat16:
        return table[ids]

    return lax.platform_dependent(table, ids, cpu=_rows_as_bits, default=lambda table, ids: table[ids])


@jax.custom_vjp
def _rows_as_bits(table: Array, ids: Array) -> Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(table, jnp.uint16)[ids], jnp.bfloat16)


def _rows_forward(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows_as_bits(table, ids), (table, ids)


def _rows_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    """Of integers there is none: added up row by row, in f32."""
    table, ids = kept
    return jnp.zeros(table.shape, jnp.float32).at[ids].add(gradient).astype(table.dtype), None


_rows_as_bits.defvjp(_rows_forward, _rows_backward)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [..., in] times weight [out, in], accumulated in f32, returned in x's dtype.

    On CPU a bf16 product without the f32 accumulator is 5-7 times slower, and a single row takes a slow path: two do
    not.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 1 and x.dtype == jnp.bfloat16:
        rows = jnp.concatenate([rows, jnp.zeros_like(rows)])
    out = lax.dot_general(
        rows, weight, (((1,), (1,)), ((), ())), precision=precision(x.dtype), preferred_element_type=jnp.float32
    )
    out = out[: max(1, x.size // x.shape[-1])].astype(x.dtype).reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def _environment() -> Any:
    """An environment of our own: in a process that lowers other modules too (vLLM's), those keep torchax's."""
    environment = torchax.tensor.Environment()
    environment.override_op_definition(
        torch.nn.functional.linear, lambda x, w, b=None: interop.call_jax(linear, x, w, b)
    )
    environment.override_op_definition(
        torch.nn.functional.embedding, lambda ids, table, *_, **__: interop.call_jax(take_rows, table, ids)
    )
    return environment


_ENVIRONMENT = _environment()


def to_jax(tensor: torch.Tensor, where: Any = None) -> Array:
    """The tensor on JAX's default device, or `where` (a device or a sharding). On one CPU device it is the same memory,
    no copy (fp32, bf16, int32; contiguous, 64-byte aligned as torch allocates)."""
    array = jax.dlpack.from_dlpack(tensor.detach().contiguous())
    return jax.device_put(array, jax.devices()[0] if where is None else where)


def take_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's parameters and buffers; the module becomes a meta skeleton.

    A tied parameter has one name, so it is there once. Non-persistent buffers (inverse frequencies) are there too.
    """
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    module.to("meta")
    return tensors


def take_params(module: nn.Module) -> Params:
    """`take_tensors` as JAX arrays that share the tensors' memory."""
    return {name: to_jax(tensor) for name, tensor in take_tensors(module).items()}


class _Method(nn.Module):
    """Calls one method of `inner`, so that functional_call can reach it."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner = inner
        self.name = name

    def forward(self, *args: Any) -> Any:
        return getattr(self.inner, self.name)(*args)


def _upright(name: str, array: Array) -> Array:
    return jnp.swapaxes(array, -1, -2) if name.endswith(TURNED) else array


def call_foreign(module: nn.Module, params: Params, **keywords: Any) -> Any:
    """Call a module that others have prepared for torchax, as they do: in torchax's own environment, by keywords.

    For use under jax.jit. `params` may leave out what the call does not use.
    """
    with _TRACING, torchax.default_env():
        state, keywords = interop.torch_view((params, keywords))
        return interop.jax_view(torch.func.functional_call(module, state, kwargs=keywords, tie_weights=False))


def lower(module: nn.Module, method: str = "forward") -> Callable[..., Any]:
    """A pure JAX function f(params, *args) of a torch module's method, to be traced by jax.jit.

    A parameter may come turned, as `name.T`: its last two axes are swapped in memory, and XLA multiplies with it as it
    lies. Arrays cross as torch views and back; a JAX function among the arguments becomes a torch one; anything else
    (tuples of ints, an attention cache) passes untouched. Raises KeyError when `params` does not name exactly the
    module's own.
    """
    bound = _Method(module, method)
    expected = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}

    def call(params: Params, *args: Any) -> Any:
        upright = {name.removesuffix(TURNED): _upright(name, array) for name, array in params.items()}
        if upright.keys() != expected:
            # functional_call ignores an unknown name silently.
            raise KeyError(f"parameters do not fit the module: {sorted(upright.keys() ^ expected)}")
        state = {f"inner.{name}": interop.torch_view(array) for name, array in upright.items()}
        with _TRACING, _ENVIRONMENT:
            return interop.jax_view(torch.func.functional_call(bound, state, interop.torch_view(args)))

    return call
