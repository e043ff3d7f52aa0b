"""torch-dflash: speculative decoding by block diffusion (DFlash) for PyTorch users on TPU, GPU and CPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_dflash.api import Move, Result, follow, generate, stream
    from torch_dflash.engine import Engine
    from torch_dflash.errors import InputError
    from torch_dflash.options import Sampling
    from torch_dflash.pair import Pair, load_pair
    from torch_dflash.requests import Request, Run
    from torch_dflash.service import make_request, open_engine

__all__ = [
    "Engine",
    "InputError",
    "Move",
    "Pair",
    "Request",
    "Result",
    "Run",
    "Sampling",
    "follow",
    "generate",
    "load_pair",
    "make_request",
    "open_engine",
    "stream",
]

_HOMES = {
    "Engine": "engine",
    "InputError": "errors",
    "Pair": "pair",
    "Request": "requests",
    "Run": "requests",
    "Sampling": "options",
    "load_pair": "pair",
    "make_request": "service",
    "open_engine": "service",
}


def __getattr__(name: str) -> Any:
    """Import on first use: jax and torch take seconds, which `torch-dflash --help` should not wait for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)
