"""torch-dflash: speculative decoding by block diffusion (DFlash) for PyTorch users on TPU, GPU and CPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_dflash.api import Move, Result, follow, generate, stream
    from torch_dflash.errors import InputError
    from torch_dflash.pair import Pair, load_pair

__all__ = ["InputError", "Move", "Pair", "Result", "follow", "generate", "load_pair", "stream"]

_HOMES = {"InputError": "errors", "Pair": "pair", "load_pair": "pair"}


def __getattr__(name: str) -> Any:
    """Import on first use: jax and torch take seconds, which `torch-dflash --help` should not wait for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)
