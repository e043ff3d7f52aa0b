"""torch-dflash: speculative decoding by block diffusion (DFlash) for PyTorch users on TPU, GPU and CPU."""

from torch_dflash.errors import InputError
from torch_dflash.generate import Result, generate, stream
from torch_dflash.pair import Pair, load_pair

__all__ = ["InputError", "Pair", "Result", "generate", "load_pair", "stream"]
