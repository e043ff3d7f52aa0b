"""What torchax 0.0.13 needs from torch 2.13 while it is being imported: names, not functions.

Two of its tables name ATen overloads with named dimensions, which torch 2.13 removed. It only looks them up. So a
placeholder hangs on each missing overload during the import and is taken off again; nothing is registered with the
dispatcher.
"""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

NAMED_OVERLOADS = {
    "all": ("dimname", "dimname_out"),
    "index_add": ("dimname",),
    "index_copy": ("dimname",),
    "index_copy_": ("dimname",),
    "index_fill": ("Dimname_Scalar", "Dimname_Tensor"),
    "index_fill_": ("Dimname_Scalar", "Dimname_Tensor"),
    "norm": ("names_ScalarOpt_dim", "names_ScalarOpt_dim_dtype", "names_dtype_out", "names_out"),
    "prod": ("dim_Dimname",),
    "std": ("correction_names", "correction_names_out", "names_dim", "names_out"),
    "std_mean": ("correction_names", "names_dim"),
    "unbind": ("Dimname",),
}


class _Removed:
    """Stands for an overload that this torch no longer has."""


@contextmanager
def removed_overloads_named() -> Iterator[None]:
    """Make the look-ups of removed overloads succeed inside the block. Does nothing where torch still has them."""
    placed = []
    for op, overloads in NAMED_OVERLOADS.items():
        packet = getattr(torch.ops.aten, op)
        for overload in set(overloads) - set(packet.overloads()):
            setattr(packet, overload, _Removed())
            placed.append((packet, overload))
    try:
        yield
    finally:
        for packet, overload in placed:
            delattr(packet, overload)


def forget_removed(autocast_policy: dict) -> None:
    """Drop the entries of torchax's autocast table that name a removed overload."""
    for key in [key for key in autocast_policy if isinstance(key, _Removed)]:
        del autocast_policy[key]


def version_line() -> str:
    """The versions at hand and the ones that fit, for the one line that a failed import gives."""
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchax", "jax"))
    return f"torchax does not import beside these versions: {found}; install torch==2.13.0 torchax==0.0.13 jax==0.10.2"


def quiet_accelerator(device_module: ModuleType) -> None:
    """Importing torchax makes "jax" torch's accelerator, which breaks torch.compile and fork_rng: say that none is
    there."""
    device_module.is_available = lambda: False  # type: ignore[attr-defined]
    device_module.device_count = lambda: 0  # type: ignore[attr-defined]
