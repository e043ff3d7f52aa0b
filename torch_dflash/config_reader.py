"""config.json -> the dataclasses of config.py. With config_rope.py the only reader of checkpoint key names.

What changes the mathematics is read, checked, or refused by name. Absent fields follow Hugging Face's rules for the
family, where these are not in doubt.
"""

from pathlib import Path

from torch_dflash.config import BlockConfig, DrafterConfig, DraftLayer, TargetConfig
from torch_dflash.config_fields import Fields, load_fields, string_list
from torch_dflash.config_rope import read_rope
from torch_dflash.errors import InputError

_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_DFLASH_KEYS = {"block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal"}
# Fields of DFlash's descendants, with the only values under which they mean plain DFlash v1.
_NEUTRAL = {
    "projector_type": ("dflash",),
    "attention_mode": ("gqa",),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0.0,),
}


def read_target_config(folder: Path) -> TargetConfig:
    """Reads `folder`/config.json and generation_config.json of a Llama or Qwen3 target. Raises InputError."""
    fields = load_fields(folder / "config.json")
    family = _FAMILIES.get(_architecture(fields))
    if family is None:
        fields.refuse("architectures", f"the target must be one of {', '.join(_FAMILIES)}")
    _refuse_unsupported(fields, family)
    for layer_type in string_list(fields, "layer_types"):
        if layer_type != "full_attention":
            fields.refuse("layer_types", "a target with layers other than full_attention is not supported")
    if fields.flag("use_sliding_window", False):
        fields.refuse("use_sliding_window", "a target with sliding-window attention is not supported")
    block = _block(fields, family)
    return TargetConfig(
        architecture=family,
        block=block,
        num_layers=fields.integer("num_hidden_layers"),
        vocab_size=fields.integer("vocab_size"),
        rope=read_rope(fields),
        context_limit=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(fields, folder / "generation_config.json"),
    )


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Reads `folder`/config.json of a DFlash v1 drafter in z-lab's layout. Raises InputError."""
    fields = load_fields(folder / "config.json")
    if fields.get("speculators_model_type") is not None:
        fields.refuse("speculators_model_type", "a speculators export is not supported; use z-lab's DFlash layout")
    if _architecture(fields) != "DFlashDraftModel":
        fields.refuse("architectures", "the drafter must be a DFlashDraftModel (DFlash v1, z-lab's layout)")
    _refuse_unsupported(fields, "qwen3")
    _refuse_descendants(fields)
    layers, vocab_size = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    depth = _either(fields, "num_target_layers").integer("num_target_layers")
    mask = _either(fields, "mask_token_id")
    if mask.integer("mask_token_id", low=0) >= vocab_size:
        mask.refuse("mask_token_id", f"it must be below vocab_size, which is {vocab_size}")
    return DrafterConfig(
        block=_block(fields, "qwen3"),
        layers=_draft_layers(fields, layers),
        rope=read_rope(fields),
        block_size=_either(fields, "block_size").integer("block_size", low=2),
        mask_token_id=mask.integer("mask_token_id", low=0),
        target_layer_ids=_target_layer_ids(fields, depth, layers),
        num_target_layers=depth,
        vocab_size=vocab_size,
        context_limit=fields.integer("max_position_embeddings"),
    )


def stated_window(folder: Path) -> int | None:
    """The sliding_window that `folder`/config.json of a drafter states; whether it is in use, other fields say."""
    fields = load_fields(folder / "config.json")
    return None if fields.get("sliding_window") is None else fields.integer("sliding_window")


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raises InputError, naming the drafter's field, unless the drafter fits a target of this shape."""
    other = "this drafter was made for another target, use the one for this target"
    same = [
        ("num_target_layers", drafter.num_target_layers, "num_hidden_layers", target.num_layers),
        ("hidden_size", drafter.block.hidden_size, "hidden_size", target.block.hidden_size),
        ("vocab_size", drafter.vocab_size, "vocab_size", target.vocab_size),
    ]
    for name, value, target_name, wanted in same:
        if value != wanted:
            raise InputError(f"drafter {name} is {value}, but the target's {target_name} is {wanted}; {other}")
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        limit = f"the target's vocab_size is {target.vocab_size}"
        raise InputError(f"drafter mask_token_id is {drafter.mask_token_id}, but {limit}; {other}")
    ids = drafter.target_layer_ids
    if not ids or len(set(ids)) < len(ids) or not all(0 <= i < target.num_layers for i in ids):
        allowed = f"they must be distinct layers 0..{target.num_layers - 1} of the target"
        raise InputError(f"drafter target_layer_ids are {list(ids)}; {allowed}")


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The taps meant by a drafter without `target_layer_ids`. Negative or repeated for shallow targets."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def _architecture(fields: Fields) -> str:
    names = string_list(fields, "architectures")
    return names[0] if len(names) == 1 else ""


def _refuse_unsupported(fields: Fields, family: str) -> None:
    if fields.get("model_type") not in (None, family):
        fields.refuse("model_type", f"with these architectures it must be {family}")
    for name in ("quantization_config", "compression_config"):
        if fields.get(name) is not None:
            fields.refuse(name, "quantised weights are not supported; use the unquantised checkpoint")
    if fields.get("hidden_act") not in (None, "silu"):
        fields.refuse("hidden_act", "only silu is supported")
    if family == "llama" and fields.integer("pretraining_tp", default=1) != 1:
        fields.refuse("pretraining_tp", "only 1 is supported; set it to 1, the weights are the same")
    if family == "qwen3" and fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "Qwen3 layers have no MLP bias")


def _block(fields: Fields, family: str) -> BlockConfig:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"it must divide num_attention_heads, which is {heads}")
    return BlockConfig(
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, family, hidden, heads),
        rms_norm_eps=fields.number("rms_norm_eps"),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
    )


def _head_dim(fields: Fields, family: str, hidden: int, heads: int) -> int:
    # Absent, Transformers takes 128 for Qwen3 and hidden/heads for Llama; other readers differ.
    unsettled = hidden % heads or (family == "qwen3" and hidden // heads != 128)
    if fields.get("head_dim") is None and unsettled:
        fields.refuse("head_dim", f"hidden_size {hidden} / num_attention_heads {heads} does not settle it; add it")
    head_dim = fields.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        fields.refuse("head_dim", "it must be even, since rotary embedding pairs the two halves")
    return head_dim


def _id_list(fields: Fields, name: str) -> list[int]:
    """A list of ids from a list, one id, or nothing."""
    value = fields.get(name)
    ids = [] if value is None else value if type(value) is list else [value]
    if any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
        fields.refuse(name, "it must be an id >= 0 or a list of them")
    return ids


def _eos_token_ids(fields: Fields, generation_path: Path) -> tuple[int, ...]:
    ids = _id_list(fields, "eos_token_id")
    if generation_path.exists():
        ids = ids + _id_list(load_fields(generation_path), "eos_token_id")
    return tuple(dict.fromkeys(ids))


def _refuse_descendants(fields: Fields) -> None:
    """DFlash's descendants often keep the v1 architecture name; their extra fields give them away."""
    dflash = fields.child("dflash_config")
    extra = [(dflash, name) for name in sorted(dflash.values.keys() - _DFLASH_KEYS)]
    extra += [(fields, name) for name in sorted(fields.values.keys() & _NEUTRAL.keys())]
    for part, name in extra:
        if part.get(name) is not None and part.get(name) not in _NEUTRAL.get(name, ()):
            part.refuse(name, "it is not part of DFlash v1, the only kind supported")


def _either(fields: Fields, name: str) -> Fields:
    """The object that holds `name`: dflash_config, else the top level. Both are allowed if they agree."""
    dflash = fields.child("dflash_config")
    if dflash.get(name) is None:
        return fields
    if fields.get(name) is not None and fields.get(name) != dflash.get(name):
        fields.refuse(name, f"it differs from dflash_config.{name} {dflash.get(name)}; remove the wrong one")
    return dflash


def _target_layer_ids(fields: Fields, depth: int, layers: int) -> tuple[int, ...]:
    part = _either(fields, "target_layer_ids")
    if part.get("target_layer_ids") is None:
        ids = list(default_target_layer_ids(depth, layers))
        part = Fields({"target_layer_ids": ids}, f"{fields.origin} (by the default rule)")
    ids = part.get("target_layer_ids")
    if type(ids) is not list or not ids or any(type(i) is not int for i in ids):
        part.refuse("target_layer_ids", "it must be a list of layer numbers")
    if len(set(ids)) < len(ids) or not all(0 <= i < depth for i in ids):
        part.refuse("target_layer_ids", f"they must be distinct layers 0..{depth - 1} of the target")
    return tuple(ids)


def _draft_layers(fields: Fields, num_layers: int) -> tuple[DraftLayer, ...]:
    """Causality and window per layer. Causality follows the layer's type even where no window is in force."""
    kinds = _layer_types(fields, num_layers)
    causal = [kind == "sliding_attention" for kind in kinds]
    dflash = fields.child("dflash_config")
    for part, name in ((dflash, "causal"), (fields, "is_causal")):  # the later one wins
        if part.get(name) is not None:
            causal = [part.flag(name, False)] * num_layers
    window = None
    if fields.flag("use_sliding_window", False) and "sliding_attention" in kinds:
        # An explicit null means no window; absent would mean 4096 in Transformers, which nobody wrote down.
        window = None if fields.values.get("sliding_window", 0) is None else fields.integer("sliding_window")
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return tuple(DraftLayer(*pair) for pair in zip(causal, windows, strict=True))


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    if fields.get("layer_types") is None:
        windowed = fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None
        first = fields.integer("max_window_layers", low=0) if windowed else num_layers
        return ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    kinds = string_list(fields, "layer_types")
    if len(kinds) != num_layers:
        fields.refuse("layer_types", f"it must have one entry for each of the num_hidden_layers {num_layers}")
    if set(kinds) - {"full_attention", "sliding_attention"}:
        fields.refuse("layer_types", "only full_attention and sliding_attention are supported")
    return kinds
