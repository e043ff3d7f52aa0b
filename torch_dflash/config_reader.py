"""config.json -> the dataclasses of config.py. The only reader of checkpoint key names.

What changes the mathematics is read, checked, or refused by name. Absent fields follow Hugging Face's rules
for the family, where these are not in doubt.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch_dflash.config import (
    BlockConfig,
    DefaultRope,
    DrafterConfig,
    DraftLayer,
    Llama3Rope,
    Rope,
    TargetConfig,
    YarnRope,
)
from torch_dflash.errors import InputError

_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_REQUIRED = None  # a default of None means that the field must be there
_ROPE_KEYS = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
}
_DFLASH_KEYS = {"block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal"}
# Fields of DFlash's descendants, with the only values under which they mean plain DFlash v1.
_NEUTRAL = {
    "projector_type": ("dflash",),
    "attention_mode": ("gqa",),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0.0,),
}


@dataclass(frozen=True)
class _Fields:
    """One JSON object and where it stands: refusals name file, field and value. null counts as absent."""

    values: dict[str, Any]
    origin: str

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def refuse(self, name: str, remedy: str) -> NoReturn:
        state = f"is {json.dumps(self.values[name])}" if name in self.values else "is missing"
        raise InputError(f"{self.origin}: {name} {state}; {remedy}")

    def integer(self, name: str, low: int = 1, default: int | None = _REQUIRED) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < low:
            self.refuse(name, f"it must be an integer >= {low}")
        return value

    def number(self, name: str, default: float | None = _REQUIRED, zero: bool = False) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not (0 < value < 1e30 or (zero and value == 0)):
            self.refuse(name, "it must be a finite number " + (">= 0" if zero else "> 0"))
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and type(value) is not bool:
            self.refuse(name, "it must be true or false")
        return default if value is None else value

    def child(self, name: str) -> "_Fields":
        value = {} if self.get(name) is None else self.get(name)
        if type(value) is not dict:
            self.refuse(name, "it must be an object or null")
        return _Fields(value, f"{self.origin}: {name}")


def read_target_config(folder: Path) -> TargetConfig:
    """Reads `folder`/config.json and generation_config.json of a Llama or Qwen3 target. Raises InputError."""
    fields = _load(folder / "config.json")
    family = _FAMILIES.get(_architecture(fields))
    if family is None:
        fields.refuse("architectures", f"the target must be one of {', '.join(_FAMILIES)}")
    _refuse_unsupported(fields, family)
    for layer_type in _string_list(fields, "layer_types"):
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
        rope=_rope(fields),
        context_limit=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(fields, folder / "generation_config.json"),
    )


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Reads `folder`/config.json of a DFlash v1 drafter in z-lab's layout. Raises InputError."""
    fields = _load(folder / "config.json")
    if fields.get("speculators_model_type") is not None:
        fields.refuse(
            "speculators_model_type", "a speculators export is not supported; use z-lab's DFlash layout"
        )
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
        rope=_rope(fields),
        block_size=_either(fields, "block_size").integer("block_size", low=2),
        mask_token_id=mask.integer("mask_token_id", low=0),
        target_layer_ids=_target_layer_ids(fields, depth, layers),
        num_target_layers=depth,
        vocab_size=vocab_size,
        context_limit=fields.integer("max_position_embeddings"),
    )


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
            raise InputError(
                f"drafter {name} is {value}, but the target's {target_name} is {wanted}; {other}"
            )
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


def _load(path: Path) -> _Fields:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: not found; give the folder of a model, with its config.json") from None
    except (OSError, ValueError) as error:  # ValueError covers bad JSON and bad UTF-8
        raise InputError(f"{path}: cannot be read as JSON ({error}); download it again") from None
    if type(values) is not dict:
        raise InputError(f"{path}: must hold a JSON object; download it again")
    return _Fields(values, str(path))


def _string_list(fields: _Fields, name: str) -> list[str]:
    value = [] if fields.get(name) is None else fields.get(name)
    if type(value) is not list or any(type(item) is not str for item in value):
        fields.refuse(name, "it must be a list of strings")
    return value


def _architecture(fields: _Fields) -> str:
    names = _string_list(fields, "architectures")
    return names[0] if len(names) == 1 else ""


def _refuse_unsupported(fields: _Fields, family: str) -> None:
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


def _block(fields: _Fields, family: str) -> BlockConfig:
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


def _head_dim(fields: _Fields, family: str, hidden: int, heads: int) -> int:
    if fields.get("head_dim") is None:
        # Transformers takes 128 for Qwen3 here and hidden/heads for Llama; other readers differ.
        if hidden % heads or (family == "qwen3" and hidden // heads != 128):
            fields.refuse(
                "head_dim", f"hidden_size {hidden} / num_attention_heads {heads} does not settle it; add it"
            )
        return hidden // heads
    head_dim = fields.integer("head_dim")
    if head_dim % 2:
        fields.refuse("head_dim", "it must be even, since rotary embedding pairs the two halves")
    return head_dim


def _rope(fields: _Fields) -> Rope:
    """RoPE from `rope_parameters` (new form) or `rope_theta` + `rope_scaling` (old form). They must agree."""
    new, old = fields.child("rope_parameters"), fields.child("rope_scaling")
    rope = new if new.values else old
    if new.values and old.values and _flat(fields, new) != _flat(fields, old):
        fields.refuse(
            "rope_scaling", "it differs from rope_parameters; keep the one the model was trained with"
        )
    rope = _Fields(_flat(fields, rope), rope.origin if rope.values else fields.origin)
    if rope.get("rope_theta") is None:
        rope.refuse(
            "rope_theta", "set rope_theta, or rope_parameters.rope_theta, to the base used in training"
        )
    theta, kind = rope.number("rope_theta"), rope.get("rope_type")
    if type(kind) is not str or kind not in _ROPE_KEYS:
        rope.refuse("rope_type", f"only {', '.join(_ROPE_KEYS)} are supported")
    for name in sorted(rope.values.keys() - _ROPE_KEYS[kind] - {"rope_theta", "rope_type"}):
        rope.refuse(name, f"this field is not known for rope_type {kind}")
    if kind == "default":
        return DefaultRope(theta)
    return _llama3(rope, theta) if kind == "llama3" else _yarn(rope, theta)


def _flat(fields: _Fields, part: _Fields) -> dict[str, Any]:
    """One RoPE object: old names replaced, top-level fields merged in, null entries dropped."""
    flat = {name: value for name, value in part.values.items() if value is not None}
    kind = flat.pop("type", None)
    if kind is not None and flat.setdefault("rope_type", kind) != kind:
        part.refuse("type", f"it differs from rope_type {flat['rope_type']}; remove the wrong one")
    if "rope_type" not in flat and flat.keys() - {"rope_theta", "partial_rotary_factor"}:
        part.refuse("rope_type", "name the kind of scaling")
    flat.setdefault("rope_type", "default")
    names = ["rope_theta", "partial_rotary_factor"]
    names += ["original_max_position_embeddings"] if flat["rope_type"] in ("llama3", "yarn") else []
    for name in names:
        top = fields.get(name)
        if top is not None and flat.setdefault(name, top) != top:
            fields.refuse(name, f"it differs from {name} {flat[name]} beside rope_type; remove the wrong one")
    if flat.pop("partial_rotary_factor", 1) != 1:
        (part if "partial_rotary_factor" in part.values else fields).refuse(
            "partial_rotary_factor", "only full rotary embedding (1.0) is supported"
        )
    return flat


def _llama3(rope: _Fields, theta: float) -> Llama3Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        rope.refuse("high_freq_factor", f"it must be above low_freq_factor, which is {low}")
    length = rope.integer("original_max_position_embeddings")
    return Llama3Rope(theta, rope.number("factor"), low, high, length)


def _yarn(rope: _Fields, theta: float) -> YarnRope:
    factor, fast, slow = rope.number("factor"), rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    mscale, mscale_all = rope.number("mscale", 0.0, zero=True), rope.number("mscale_all_dim", 0.0, zero=True)
    if fast < slow:
        rope.refuse("beta_fast", f"it must not be below beta_slow, which is {slow}")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    implied = scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=rope.number("attention_factor", implied),
        truncate=rope.flag("truncate", True),
    )


def _id_list(fields: _Fields, name: str) -> list[int]:
    """A list of ids from a list, one id, or nothing."""
    value = fields.get(name)
    ids = [] if value is None else value if type(value) is list else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        fields.refuse(name, "it must be an id >= 0 or a list of them")
    return ids


def _eos_token_ids(fields: _Fields, generation_path: Path) -> tuple[int, ...]:
    ids = _id_list(fields, "eos_token_id")
    if generation_path.exists():
        ids = ids + _id_list(_load(generation_path), "eos_token_id")
    return tuple(dict.fromkeys(ids))


def _refuse_descendants(fields: _Fields) -> None:
    """DFlash's descendants often keep the v1 architecture name; their extra fields give them away."""
    dflash = fields.child("dflash_config")
    extra = [(dflash, name) for name in sorted(dflash.values.keys() - _DFLASH_KEYS)]
    extra += [(fields, name) for name in sorted(fields.values.keys() & _NEUTRAL.keys())]
    for part, name in extra:
        if part.get(name) is not None and part.get(name) not in _NEUTRAL.get(name, ()):
            part.refuse(name, "it is not part of DFlash v1, the only kind supported")


def _either(fields: _Fields, name: str) -> _Fields:
    """The object that holds `name`: dflash_config, else the top level. Both are allowed if they agree."""
    dflash = fields.child("dflash_config")
    if dflash.get(name) is None:
        return fields
    if fields.get(name) is not None and fields.get(name) != dflash.get(name):
        fields.refuse(name, f"it differs from dflash_config.{name} {dflash.get(name)}; remove the wrong one")
    return dflash


def _target_layer_ids(fields: _Fields, depth: int, layers: int) -> tuple[int, ...]:
    part = _either(fields, "target_layer_ids")
    if part.get("target_layer_ids") is None:
        ids = list(default_target_layer_ids(depth, layers))
        part = _Fields({"target_layer_ids": ids}, f"{fields.origin} (by the default rule)")
    ids = part.get("target_layer_ids")
    if type(ids) is not list or not ids or any(type(i) is not int for i in ids):
        part.refuse("target_layer_ids", "it must be a list of layer numbers")
    if len(set(ids)) < len(ids) or not all(0 <= i < depth for i in ids):
        part.refuse("target_layer_ids", f"they must be distinct layers 0..{depth - 1} of the target")
    return tuple(ids)


def _draft_layers(fields: _Fields, num_layers: int) -> tuple[DraftLayer, ...]:
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


def _layer_types(fields: _Fields, num_layers: int) -> list[str]:
    if fields.get("layer_types") is None:
        windowed = fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None
        first = fields.integer("max_window_layers", low=0) if windowed else num_layers
        return ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    kinds = _string_list(fields, "layer_types")
    if len(kinds) != num_layers:
        fields.refuse("layer_types", f"it must have one entry for each of the num_hidden_layers {num_layers}")
    if set(kinds) - {"full_attention", "sliding_attention"}:
        fields.refuse("layer_types", "only full_attention and sliding_attention are supported")
    return kinds
