"""The configuration and its plausible mistakes, each one a value that says how the drafter is to be run.

A mistake changes the config or, where no config speaks of it, the inputs. One at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_dflash.config import DefaultRope, DrafterConfig, DraftLayer, Rope, TargetConfig
from torch_dflash.config_draft import default_target_layer_ids

COMMON_THETAS = (1e4, 1e6)
COMMON_BLOCK_SIZES = (8, 16)
MAX_SPECIAL_IDS = 3


@dataclass(frozen=True)
class Inputs:
    """How the drafter is fed, as far as its config does not say. The defaults are DFlash's.

    block_offset: added to the block's positions. hidden_context: how many of the newest context positions the block
    does not see, None for all. hidden_norm: whether it is applied to the context. final_norm: whether the target's
    last layer is tapped behind the final norm. first_read: block position of the first draft.
    """

    block_offset: int = 0
    hidden_context: int | None = 0
    hidden_norm: bool = True
    final_norm: bool = True
    first_read: int = 1


@dataclass(frozen=True)
class Variant:
    """One way to run the drafter. `remedy`: what to do if this way is better than the configuration."""

    field: str
    name: str
    config: DrafterConfig
    remedy: str
    inputs: Inputs = Inputs()


_NOT_IN_CONFIG = "no field of config.json says so: the drafter was trained otherwise than DFlash, or is damaged"


def configured(config: DrafterConfig) -> Variant:
    """The drafter as its config says."""
    return Variant("as it is", "the configuration", config, "")


def plausible_mistakes(
    target: TargetConfig, drafter: DrafterConfig, tokenizer: Any, stated_window: int | None
) -> tuple[Variant, ...]:
    """Every mistake that can be made with this pair; of each kind the likely ones first.

    `stated_window`: the sliding_window that the drafter's config.json states, in use or not.
    """
    found = [
        *_taps(target, drafter),
        *_ropes(target, drafter),
        *_layers(drafter, stated_window),
        *_mask_ids(target, drafter, tokenizer),
        *_block_sizes(drafter),
        *_inputs(drafter),
    ]
    unique = {(drafter, Inputs()): configured(drafter)}
    for variant in found:
        unique.setdefault((variant.config, variant.inputs), variant)
    return tuple(unique.values())[1:]


def _taps(target: TargetConfig, drafter: DrafterConfig) -> Iterator[Variant]:
    ids, depth = drafter.target_layer_ids, target.num_layers

    def shifted(by: int) -> tuple[int, ...]:
        return tuple(min(max(i + by, 0), depth - 1) for i in ids)

    names: dict[tuple[int, ...], list[str]] = {}
    for taps, name in (
        (shifted(1), "one layer later"),
        (shifted(-1), "one layer earlier"),
        (ids[::-1], "reversed"),
        (default_target_layer_ids(depth, len(ids)), "DFlash's default"),
    ):
        if len(set(taps)) == len(ids) and all(0 <= tap < depth for tap in taps):
            names.setdefault(taps, []).append(name)
    for taps, known_as in names.items():
        name, remedy = f"{' '.join(map(str, taps))} ({', '.join(known_as)})", _set("target_layer_ids", list(taps))
        yield Variant("taps", name, replace(drafter, target_layer_ids=taps), remedy)
    if depth - 1 in ids:
        name = f"layer {depth - 1} before the final norm"
        yield Variant("taps", name, drafter, _NOT_IN_CONFIG, Inputs(final_norm=False))


def _ropes(target: TargetConfig, drafter: DrafterConfig) -> Iterator[Variant]:
    own = drafter.rope
    if target.rope != own:
        text = f"{describe_rope(target.rope)}, as the target"
        plain = target.rope == DefaultRope(target.rope.theta) and own == DefaultRope(own.theta)
        same = "copy the target's RoPE fields into the drafter's config.json"
        yield _rope(drafter, target.rope, text, _set("rope_theta", _number(target.rope.theta)) if plain else same)
    if own != DefaultRope(own.theta):
        remedy = "remove the RoPE scaling from the drafter's config.json"
        yield _rope(drafter, DefaultRope(own.theta), "without scaling", remedy)
    for theta in _unique((own.theta * 100, own.theta / 100, *COMMON_THETAS), without={own.theta}):
        rope = replace(own, theta=theta)
        if rope != target.rope and theta > 1:
            yield _rope(drafter, rope, describe_rope(rope), _set("rope_theta", _number(theta)))


def _rope(drafter: DrafterConfig, rope: Rope, name: str, remedy: str) -> Variant:
    return Variant("RoPE", name, replace(drafter, rope=rope), remedy)


def describe_rope(rope: Rope) -> str:
    """A RoPE in a few words, its base always."""
    kind = type(rope).__name__.removesuffix("Rope").lower()
    return f"theta {_number(rope.theta)}" + ("" if kind == "default" else f", {kind} scaling")


def _number(value: float) -> str:
    return str(int(value) if value.is_integer() else value)


def _layers(drafter: DrafterConfig, stated_window: int | None) -> Iterator[Variant]:
    def changed(name: str, remedy: str, **changes: Any) -> Variant:
        layers = tuple(replace(layer, **changes) for layer in drafter.layers)
        return Variant("attention", name, replace(drafter, layers=layers), remedy)

    yield changed("all layers causal in the block", _set("is_causal", "true"), causal=True)
    yield changed("all layers bidirectional", _set("is_causal", "false"), causal=False)
    if any(layer.window for layer in drafter.layers):
        yield changed("window dropped", _set("use_sliding_window", "false"), window=None)
        by_kind = tuple(DraftLayer(layer.window is not None, layer.window) for layer in drafter.layers)
        remedy = "remove is_causal and dflash_config.causal from the drafter's config.json: layer_types decide"
        yield Variant("attention", "windowed layers causal", replace(drafter, layers=by_kind), remedy)
    elif stated_window is not None:
        for causal, name in ((False, "bidirectional"), (True, "causal")):
            remedy = f'{_set("use_sliding_window", "true")}, layer_types to "sliding_attention", is_causal to '
            changes = {"window": stated_window, "causal": causal}
            yield changed(f"window {stated_window} in all layers, {name}", remedy + str(causal).lower(), **changes)


def _mask_ids(target: TargetConfig, drafter: DrafterConfig, tokenizer: Any) -> Iterator[Variant]:
    own, named, special = drafter.mask_token_id, dict[int | None, str](), list[int]()
    if tokenizer is not None:
        names = ("eos", "bos", "unk", "pad", "mask")  # of several names the last one counts
        named = {getattr(tokenizer, f"{name}_token_id"): name for name in names}
        others = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        special = sorted(others, key=lambda i: abs(i - own))[:MAX_SPECIAL_IDS]
    for token in _unique((*special, *reversed(named), 0, own - 1, own + 1), without={own, None}):
        if 0 <= token < target.vocab_size:
            name = " ".join(part for part in (str(token), named.get(token, ""), token_text(tokenizer, token)) if part)
            config = replace(drafter, mask_token_id=token)
            yield Variant("mask id", name, config, _set("mask_token_id", token))


def token_text(tokenizer: Any, token: int) -> str:
    """The token's text, quoted and in ASCII; empty where it has none."""
    text = "" if tokenizer is None else tokenizer.decode([token])
    return ascii(text) if text else ""


def _block_sizes(drafter: DrafterConfig) -> Iterator[Variant]:
    own = drafter.block_size
    for size in _unique((*COMMON_BLOCK_SIZES, own // 2, own * 2), without={own, 1}):
        yield Variant("block_size", str(size), replace(drafter, block_size=size), _set("block_size", size))


def _inputs(drafter: DrafterConfig) -> Iterator[Variant]:
    for field, name, inputs in (
        ("positions", "block one position later", Inputs(block_offset=1)),
        ("positions", "block one position earlier", Inputs(block_offset=-1)),
        ("positions", "drafts read one place earlier", Inputs(first_read=0)),
        ("context", "one position short", Inputs(hidden_context=1)),
        ("context", "none at all", Inputs(hidden_context=None)),
        ("context", "hidden_norm skipped", Inputs(hidden_norm=False)),
    ):
        yield Variant(field, name, drafter, _NOT_IN_CONFIG, inputs)


def _set(field: str, value: Any) -> str:
    return f"set {field} to {value} in the drafter's config.json"


def _unique(values: Iterable[Any], without: Iterable[Any]) -> Sequence[Any]:
    """In order, each once."""
    return [value for value in dict.fromkeys(values) if value not in without]
