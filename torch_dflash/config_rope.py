"""Rotary embedding from a checkpoint's config, in either form."""

import math
from typing import Any

from torch_dflash.config import DefaultRope, Llama3Rope, Rope, YarnRope
from torch_dflash.config_fields import Fields

_ROPE_KEYS = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
}


def read_rope(fields: Fields) -> Rope:
    """RoPE from `rope_parameters` (new form) or `rope_theta` + `rope_scaling` (old form). They must agree."""
    new, old = fields.child("rope_parameters"), fields.child("rope_scaling")
    rope = new if new.values else old
    if new.values and old.values and _flat(fields, new) != _flat(fields, old):
        fields.refuse("rope_scaling", "it differs from rope_parameters; keep the one the model was trained with")
    rope = Fields(_flat(fields, rope), rope.origin if rope.values else fields.origin)
    if rope.get("rope_theta") is None:
        rope.refuse("rope_theta", "set rope_theta, or rope_parameters.rope_theta, to the base used in training")
    theta, kind = rope.number("rope_theta"), rope.get("rope_type")
    if theta <= 1:
        rope.refuse("rope_theta", "it must be above 1: it is the base whose powers are the wavelengths")
    if type(kind) is not str or kind not in _ROPE_KEYS:
        rope.refuse("rope_type", f"only {', '.join(_ROPE_KEYS)} are supported")
    for name in sorted(rope.values.keys() - _ROPE_KEYS[kind] - {"rope_theta", "rope_type"}):
        rope.refuse(name, f"this field is not known for rope_type {kind}")
    if kind == "default":
        return DefaultRope(theta)
    return _llama3(rope, theta) if kind == "llama3" else _yarn(rope, theta)


def _flat(fields: Fields, part: Fields) -> dict[str, Any]:
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


def _llama3(rope: Fields, theta: float) -> Llama3Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        rope.refuse("high_freq_factor", f"it must be above low_freq_factor, which is {low}")
    length = rope.integer("original_max_position_embeddings")
    return Llama3Rope(theta, rope.number("factor"), low, high, length)


def _yarn(rope: Fields, theta: float) -> YarnRope:
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
