"""The config.json of an EAGLE-3 head, in the layout of yuhuili's checkpoints (arXiv:2503.01840 and its public code).

Which layers are tapped is not in those files: the code taps the inputs of layers 2, L/2 and L-3 of a target with L
layers. Files of other makers may say it, as `eagle_aux_hidden_state_layer_ids`, counted in the same way.
"""

from pathlib import Path

from torch_dflash.config import Eagle3Config, TargetConfig
from torch_dflash.config_block import architecture, read_block, refuse_unsupported
from torch_dflash.config_fields import LARGEST_SIZE, Fields, load_fields
from torch_dflash.config_rope import read_rope
from torch_dflash.errors import InputError

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_TAPS = 3


def is_eagle3(folder: Path) -> bool:
    """Whether `folder`/config.json is one. Raises InputError when it cannot be read."""
    return architecture(load_fields(folder / "config.json")) == ARCHITECTURE


def read_eagle3_config(folder: Path, target: TargetConfig) -> Eagle3Config:
    """Reads `folder`/config.json and checks it against the target. Raises InputError."""
    fields = load_fields(folder / "config.json")
    if architecture(fields) != ARCHITECTURE:
        fields.refuse("architectures", f"an EAGLE-3 head has {ARCHITECTURE}")
    refuse_unsupported(fields, "llama")
    if fields.integer("num_hidden_layers") != 1:
        fields.refuse("num_hidden_layers", "an EAGLE-3 head has one layer")
    vocab_size = fields.integer("vocab_size", high=LARGEST_SIZE)
    config = Eagle3Config(
        block=read_block(fields, "llama"),
        rope=read_rope(fields),
        target_layer_ids=_taps(fields, target.num_layers),
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size", high=vocab_size),
        context_limit=fields.integer("max_position_embeddings"),
    )
    _check_target(config, target)
    return config


def default_tap_inputs(depth: int) -> list[int]:
    """Layers whose inputs EAGLE's code taps.  Example: 32 -> [2, 16, 29]"""
    return [2, depth // 2, depth - 3]


def _taps(fields: Fields, depth: int) -> tuple[int, ...]:
    """Outputs of the layers before those whose inputs are meant."""
    ids = fields.child("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = default_tap_inputs(depth)
    if type(ids) is not list or len(ids) != NUM_TAPS or any(type(i) is not int for i in ids):
        fields.refuse("eagle_config", f"eagle_aux_hidden_state_layer_ids must be {NUM_TAPS} layer numbers")
    taps = tuple(i - 1 for i in ids)
    if len(set(taps)) < NUM_TAPS or not all(0 <= i < depth for i in taps):
        fields.refuse("eagle_config", f"inputs of layers {ids} are tapped: they must be distinct layers 1..{depth}")
    return taps


def _check_target(config: Eagle3Config, target: TargetConfig) -> None:
    other = "this head was made for another target, use the one for this target"
    for name, own, wanted in (
        ("hidden_size", config.block.hidden_size, target.block.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            raise InputError(f"EAGLE-3 head: {name} is {own}, but the target's is {wanted}; {other}")
