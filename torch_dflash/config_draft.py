"""A drafter's config in z-lab's terms: taps, block, causality, windows, and which descendants are refused."""

from torch_dflash.config import ZLAB, DrafterConfig, DraftLayer, Layout, Scales
from torch_dflash.config_block import architecture, read_block, refuse_unsupported
from torch_dflash.config_dflash2 import DFLASH_2_FIELDS, SCALE_FIELDS, read_convolution, read_scales, read_selector
from torch_dflash.config_fields import LARGEST_SIZE, MOST_LAYERS, Fields, string_list
from torch_dflash.config_layouts import DFLASH_2, SPECULATORS, either
from torch_dflash.config_rope import read_rope

_LARGEST_BLOCK = 1024  # trained blocks have 8 to 16 tokens
_DFLASH_KEYS = {
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal"),
    *("use_swa", "swa_window_size"),  # Model-Optimizer's, see config_layouts.py
}
# Fields of DFlash's descendants, with the only values under which they mean plain DFlash v1.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "projector_type": ("dflash",),
    "attention_mode": ("gqa",),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0.0,),
    "selector_rank": (0,),
    "selector_top_k": (0,),
    "conv_kernel_size": (0,),
    "conv_group_size": (0,),
    "markov_rank": (0,),
    "gru_hidden_dim": (0,),
    "emb_dim": (0,),
}


def read_draft(fields: Fields, layout: Layout) -> DrafterConfig:
    """All of a drafter's config, from fields in z-lab's terms. Raises InputError."""
    refuse_unsupported(fields, "qwen3")
    second = architecture(fields) == DFLASH_2
    _refuse_descendants(fields, layout, second)
    layers = fields.integer("num_hidden_layers", high=MOST_LAYERS)
    depth = _if_said(either(fields, "num_target_layers"), "num_target_layers", MOST_LAYERS, layout)
    vocab_size = _if_said(fields, "vocab_size", LARGEST_SIZE, layout)
    mask = either(fields, "mask_token_id")
    if vocab_size is not None and mask.integer("mask_token_id", low=0) >= vocab_size:
        mask.refuse("mask_token_id", f"it must be below vocab_size, which is {vocab_size}")
    block = read_block(fields, "qwen3")
    block_size = either(fields, "block_size").integer("block_size", low=2, high=_LARGEST_BLOCK)
    return DrafterConfig(
        block=block,
        layers=_draft_layers(fields, layers),
        rope=read_rope(fields),
        block_size=block_size,
        mask_token_id=mask.integer("mask_token_id", low=0),
        target_layer_ids=_target_layer_ids(fields, depth, layers),
        num_target_layers=depth,
        vocab_size=vocab_size,
        context_limit=fields.integer("max_position_embeddings"),
        draft_vocab_size=fields.integer("draft_vocab_size") if layout == SPECULATORS else None,
        layout=layout,
        convolution=read_convolution(fields, block_size, block.hidden_size) if second else None,
        selector=read_selector(fields, fields.integer("vocab_size", high=LARGEST_SIZE)) if second else None,
        scales=read_scales(fields) if layout == ZLAB else Scales(),
    )


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The taps meant by a drafter without `target_layer_ids`. Negative or repeated for shallow targets."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def _if_said(fields: Fields, name: str, high: int, layout: Layout) -> int | None:
    """z-lab's layout always says it; others may leave it out."""
    return None if layout != ZLAB and fields.get(name) is None else fields.integer(name, high=high)


def _refuse_descendants(fields: Fields, layout: Layout, second: bool) -> None:
    """DFlash's descendants often keep the v1 architecture name; their extra fields give them away."""
    dflash = fields.child("dflash_config")
    known = (SCALE_FIELDS if layout == ZLAB else set()) | (DFLASH_2_FIELDS if second else set())
    extra = [(dflash, name) for name in sorted(dflash.values.keys() - _DFLASH_KEYS - known)]
    extra += [(fields, name) for name in sorted((fields.values.keys() & _NEUTRAL.keys()) - known)]
    for part, name in extra:
        if part.get(name) is not None and part.get(name) not in _NEUTRAL.get(name, ()):
            if layout == ZLAB and name in DFLASH_2_FIELDS:
                part.refuse(name, f"it belongs to {DFLASH_2}: name that in architectures, or use a drafter without it")
            part.refuse(name, f"it is not part of DFlash {'2' if second else 'v1'}; use a drafter without it")


def _target_layer_ids(fields: Fields, depth: int | None, layers: int) -> tuple[int, ...]:
    part = either(fields, "target_layer_ids")
    if part.get("target_layer_ids") is None and depth is not None:
        ids = list(default_target_layer_ids(depth, layers))
        part = Fields({"target_layer_ids": ids}, f"{fields.origin} (by the default rule)")
    ids = part.get("target_layer_ids")
    limit = MOST_LAYERS if depth is None else depth
    if type(ids) is not list or not ids or any(type(i) is not int for i in ids):
        part.refuse("target_layer_ids", "it must be a list of layer numbers")
    if len(set(ids)) < len(ids) or not all(0 <= i < limit for i in ids):
        part.refuse("target_layer_ids", f"they must be distinct layers 0..{limit - 1} of the target")
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
