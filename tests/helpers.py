"""Pairs on disk for the tests, golden or random, and what is read from them."""

import functools
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch
from safetensors.torch import save_file

from torch_dflash import Pair, load_pair
from torch_dflash.config import DrafterConfig
from torch_dflash.config_reader import read_drafter_config, read_target_config
from torch_dflash.device import Device
from torch_dflash.engine import Engine
from torch_dflash.models.drafter import Drafter
from torch_dflash.models.target import Target
from torch_dflash.pace import Steady
from torch_dflash.pair import load_drafter, load_target
from torch_dflash.requests import Request, Run
from torch_dflash.sampling import choose, choose_greedily
from torch_dflash.state import Capacity

COMPILED = "/jax/core/compile/backend_compile_duration"
GOLDEN = Path(__file__).parent / "golden"
BYTES_PAIR = Path(__file__).parent.parent / "torch_dflash" / "data" / "bytes-pair"

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 12,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
DRAFTER = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 4,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 11, "target_layer_ids": [1, 0]},
}
DFLASH_2 = {"selector_rank": 6, "selector_top_k": 4, "conv_kernel_size": 3, "conv_group_size": 8}
SCALES = {"input_embedding_scale": 0.7, "output_multiplier": 0.6, "final_logit_softcapping": 4.0}


def second(**changes: Any) -> dict[str, Any]:
    """Changes to a drafter's config.json that make it a DFlash 2 drafter."""
    own = {**DRAFTER["dflash_config"], **DFLASH_2, **SCALES, **changes}
    return {"architectures": ["DFlash2DraftModel"], "dflash_config": own}


@dataclass(frozen=True)
class Loaded:
    """A pair as `generate` takes it, and the same weights as eager modules."""

    folder: Path
    pair: Pair
    target: Target
    drafter: Drafter
    config: DrafterConfig


def load(folder: Path, **options: Any) -> Loaded:
    """The pair in folder/target and folder/draft."""
    pair = load_pair(folder / "target", folder / "draft", **options)
    config, drafter = load_drafter(folder / "draft", torch.float32)
    return Loaded(folder, pair, load_target(folder / "target", torch.float32)[1], drafter, config)


def golden(name: str) -> Path:
    """The folder of a golden pair; the weights of trained-bytes ship with the package."""
    return BYTES_PAIR if name == "trained-bytes" else GOLDEN / name


@functools.cache
def golden_pair(name: str, changes: str = "{}") -> Pair:
    """Loaded once, so that what one test file has compiled serves the next. `changes`: JSON for the drafter's
    config."""
    with tempfile.TemporaryDirectory() as folder:
        draft = changed_draft(name, json.loads(changes), Path(folder))
        return load_pair(golden(name) / "target", draft)


def changed_draft(name: str, changes: dict[str, Any], folder: Path) -> Path:
    """A golden drafter with another config.json; the weights are linked."""
    config = json.loads((golden(name) / "draft" / "config.json").read_text()) | changes
    _write_config(folder, config)
    (folder / "model.safetensors").symlink_to((golden(name) / "draft" / "model.safetensors").resolve())
    return folder


@functools.cache
def golden_data(name: str, variant: str = "golden") -> dict[str, Any]:
    """What the original did with that pair."""
    return json.loads((GOLDEN / name / f"{variant}.json").read_text())


def write_target(folder: Path, seed: int = 16, **changes: Any) -> Path:
    """A random target; `changes` go into its config.json."""
    _write_config(folder, TARGET | changes)
    with torch.device("meta"):
        module = Target(read_target_config(folder))
    return _write_weights(folder, module, seed, "model.")


def write_drafter(folder: Path, seed: int = 105, **changes: Any) -> Path:
    """A random drafter for `write_target`'s target."""
    _write_config(folder, DRAFTER | changes)
    with torch.device("meta"):
        module = Drafter(read_drafter_config(folder))
    return _write_weights(folder, module, seed, "")


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def _write_weights(folder: Path, module: torch.nn.Module, seed: int, prefix: str) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        value = 1 + 0.2 * noise if tensor.ndim == 1 else noise * 2 / tensor.shape[-1] ** 0.5
        tensors[name if name.startswith("lm_head") else prefix + name] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


def prompt_of(length: int, vocab_size: int = 12, seed: int = 0) -> list[int]:
    """Random token ids, other ones for other lengths."""
    source = random.Random(f"{length} {seed}")
    return [source.randrange(vocab_size) for _ in range(length)]


def run_engine(
    pair: Pair,
    proposer: Any,
    requests: Sequence[Request],
    capacity: Capacity,
    max_steps: int = 4,
    after_step: Callable[[Engine], None] = lambda engine: None,
) -> list[Run]:
    """All requests through one engine, in their order; `after_step` looks at it after every dispatch."""
    chosen = choose_greedily if all(request.sampling.is_greedy for request in requests) else choose
    engine = Engine(Device(pair, [proposer], capacity, max_steps, chosen), Steady(proposer))
    runs = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
        after_step(engine)
    return runs


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the compilations inside the block."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **details: Any) -> None:
        if event == COMPILED:
            seen.append(str(details))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
