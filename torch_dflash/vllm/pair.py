"""What is served: a drafter that fits vLLM's target and its settings, or one line that says why not."""

from dataclasses import dataclass

from bridge.platform import Platform
from bridge.views import Params, take_tensors
from bridge.vllm_pages import stored_width
from torch_dflash.block import DrafterFunctions, lower_drafter
from torch_dflash.config import ZLAB, DrafterConfig, TargetShape
from torch_dflash.config_eagle import is_eagle3
from torch_dflash.config_reader import check_pair, read_drafter_config
from torch_dflash.errors import InputError, checked_integer
from torch_dflash.hub import resolve_draft
from torch_dflash.pair import DTYPES, load_drafter, place_weights
from torch_dflash.sharding import check_drafter_divides

CACHE_DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class Setup:
    """What `vllm serve` was told, as far as a drafter depends on it.

    draft: folder or hub id. architecture, shape: the target's. gives_hidden_states: whether vLLM's module of the target
    can hand over its layers' outputs. kv_heads, head_dim: of its K/V cache. tp, pp, dp: devices for a model, stages,
    and data-parallel groups.
    """

    draft: str
    num_speculative_tokens: int
    architecture: str
    shape: TargetShape
    kv_heads: int
    head_dim: int
    gives_hidden_states: bool
    is_hybrid: bool
    has_mrope: bool
    dtype: str
    cache_dtype: str
    tp: int
    pp: int
    dp: int


def served_config(setup: Setup) -> DrafterConfig:
    """The drafter's config, fit for all of it. Nothing but config.json is read. Raises InputError."""
    _check_target(setup)
    _check_settings(setup)
    folder = resolve_draft(setup.draft)
    if is_eagle3(folder):
        raise InputError(f'model "{setup.draft}" is an EAGLE-3 head: use "method": "eagle3", or a DFlash drafter')
    config = read_drafter_config(folder)
    check_pair(setup.shape, config)
    if config.layout == ZLAB and setup.shape.num_layers - 1 in config.target_layer_ids:
        reason = "it is tapped behind the final norm, and vLLM hands it over before"
        raise InputError(f"drafter target_layer_ids name the last layer {setup.shape.num_layers - 1}: {reason}")
    checked_integer(
        setup.num_speculative_tokens,
        "num_speculative_tokens",
        1,
        config.block_size - 1,
        f"the drafter's block of {config.block_size} is the anchor and its drafts",
    )
    check_drafter_divides(config, setup.tp)
    _check_pages(setup, config)
    return config


def _check_pages(setup: Setup, config: DrafterConfig) -> None:
    """The drafter's layers have pages of the target's shape, so that vLLM keeps them in one group: groups share
    arrays."""
    own = config.block
    if own.num_kv_heads > setup.kv_heads or stored_width(own.head_dim) != stored_width(setup.head_dim):
        pairs = (own.num_kv_heads, own.head_dim), (setup.kv_heads, setup.head_dim)
        shapes = [f"{heads} K/V heads of {dim}" for heads, dim in pairs]
        raise InputError(f"the drafter has {shapes[0]} and the target {shapes[1]}: they do not fit into its pages")


def _check_target(setup: Setup) -> None:
    name, instead = f"target architecture {setup.architecture}", "serve it without speculative-config"
    if setup.is_hybrid:
        raise InputError(f"{name} has recurrent layers, whose state cannot be rolled back: {instead}")
    if setup.has_mrope:
        raise InputError(f"{name} has positions in three dimensions (M-RoPE), which no DFlash drafter knows: {instead}")
    if not setup.gives_hidden_states:
        raise InputError(f"{name} cannot hand over its layers' outputs in this vLLM (SupportsEagle3): {instead}")


def _check_settings(setup: Setup) -> None:
    for name, value in (("pipeline_parallel_size", setup.pp), ("data_parallel_size", setup.dp)):
        if value > 1:
            raise InputError(f"{name} is {value}: DFlash drafts on one group of devices only, use 1")
    if setup.dtype not in DTYPES:
        raise InputError(f"dtype is {setup.dtype}: DFlash runs in {' or '.join(DTYPES)}")
    if setup.cache_dtype not in CACHE_DTYPES:
        raise InputError(
            f"kv_cache_dtype is {setup.cache_dtype}: DFlash keeps its context in {', '.join(CACHE_DTYPES)}"
        )


def load_served(setup: Setup, config: DrafterConfig, platform: Platform) -> tuple[DrafterFunctions, Params]:
    """The drafter's functions and its weights on the devices. Raises InputError."""
    _, module = load_drafter(resolve_draft(setup.draft), DTYPES[setup.dtype])
    return lower_drafter(module, config), place_weights(take_tensors(module), platform)
