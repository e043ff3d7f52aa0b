"""Foreign layouts of DFlash drafters, each turned into z-lab's fields, so that config_draft.py checks them all.

config.json says which layout it is. What a layout leaves open is refused, never guessed. Sources: Hugging Face
transformers 5.24 (Muse), vllm-project/speculators at c05b95b, NVIDIA/Model-Optimizer at a2fbac7.
"""

from typing import Any

from torch_dflash.config import ZLAB, Layout
from torch_dflash.config_block import architecture
from torch_dflash.config_fields import LARGEST_SIZE, MOST_LAYERS, Fields, string_list

MUSE = Layout(
    "Muse assistant",
    renames=(("encoder.fc.weight", "fc.weight"), ("encoder.output_norm_enc.weight", "hidden_norm.weight")),
)
# verifier_norm and verifier_lm_head make the targets of its training; t2d is d2t's inverse as a mask.
SPECULATORS = Layout("speculators", unused=("verifier_norm.weight", "verifier_lm_head.weight", "t2d"))

DFLASH_2 = "DFlash2DraftModel"  # z-lab's, as PyPI dflash 0.1.0 reads it

# What speculators writes beside transformer_layer_config in some versions. Said twice, it must be said alike.
_LAYER_FIELDS = (
    "hidden_size",
    "vocab_size",
    "layer_types",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
)
_NO_DRAFTERS = {  # part of an architecture's name, in lower case -> what it is
    "dflash2": "a DFlash 2 drafter in another layout than z-lab's",
    "dspark": "a DSpark drafter, which adds a head that DFlash v1 does not have",
    "domino": "a Domino drafter, which adds a head that DFlash v1 does not have",
    "eagle": "an EAGLE head, which drafts one token at a time",
    "medusa": "a set of Medusa heads",
    "mtp": "a multi-token-prediction head",
}


def zlab_fields(fields: Fields) -> tuple[Fields, Layout]:
    """The config in z-lab's terms, and the layout it came in. Raises InputError, naming the field as it was written."""
    if fields.get("speculators_model_type") is not None:
        return _speculators(fields), SPECULATORS
    name = architecture(fields)
    if name == DFLASH_2:
        for window in ("use_swa", "swa_window_size"):
            if fields.child("dflash_config").get(window) not in (None, False):
                reason = f"it is Model-Optimizer's, which has no {DFLASH_2}; remove it"
                fields.child("dflash_config").refuse(window, reason)
        return fields, ZLAB
    if name not in ("MuseGlimmerAssistantModel", "DFlashDraftModel"):
        fields.refuse("architectures", _no_drafter(name))
    return (_model_optimizer(fields), ZLAB) if name == "DFlashDraftModel" else (_muse(fields), MUSE)


def _no_drafter(name: str) -> str:
    names = f"DFlashDraftModel, {DFLASH_2}, MuseGlimmerAssistantModel or speculators"
    wanted = f"the drafter must be a DFlash drafter ({names})"
    kinds = [kind for part, kind in _NO_DRAFTERS.items() if part in name.lower()]
    return f"this is {kinds[0]}; {wanted}" if kinds else wanted


def _with(fields: Fields, layout: str, **changes: Any) -> Fields:
    return Fields(fields.values | changes, f"{fields.origin} ({layout})")


def _muse(fields: Fields) -> Fields:
    """Every layer is bidirectional, and its window counts the edge in: |q - k| <= sliding_window."""
    if fields.get("model_type") not in (None, "muse_glimmer_assistant"):
        fields.refuse("model_type", "with these architectures it must be muse_glimmer_assistant")
    for name in ("layer_types", "target_layer_ids"):
        if fields.get(name) is None:
            fields.refuse(name, "this layout must name it")
    changes: dict[str, Any] = {"model_type": "qwen3", "is_causal": False, "use_sliding_window": True}
    if "sliding_attention" in string_list(fields, "layer_types"):
        changes["sliding_window"] = fields.integer("sliding_window", high=2**31 - 2) + 1
    return _with(fields, MUSE.name, **changes)


def _speculators(fields: Fields) -> Fields:
    """Decoder in `transformer_layer_config`, own head of `draft_vocab_size` rows, taps counted from the embedding.

    Sliding layers are causal unless sliding_window_non_causal; full layers never are. Its training bounds the window
    once for a block (context from anchor - W on); as in vLLM, which serves these, each query here has its own.
    """
    _check_speculators(fields)
    layer = fields.child("transformer_layer_config")
    for name in _LAYER_FIELDS:
        own, top = layer.get(name), fields.get(name)
        if own is not None and top is not None and own != top:
            fields.refuse(name, f"it differs from transformer_layer_config.{name}; remove the wrong one")
    merged = Fields(fields.values | {k: v for k, v in layer.values.items() if v is not None}, layer.origin)
    vocab_size = merged.integer("vocab_size", high=LARGEST_SIZE)
    fields.integer("draft_vocab_size", high=vocab_size)
    if fields.get("target_hidden_size") not in (None, merged.get("hidden_size")):
        fields.refuse("target_hidden_size", "it must be the drafter's own hidden_size")
    changes: dict[str, Any] = {"target_layer_ids": _taps_from_embedding(fields)}
    if merged.get("model_type") == "llama":
        changes["model_type"] = "qwen3"  # the library builds its Qwen3 layers from either
    windowed = merged.flag("use_sliding_window", False) and merged.get("sliding_window") is not None
    if fields.flag("sliding_window_non_causal", False) or not windowed:
        changes["is_causal"] = False
    if not windowed:
        changes["use_sliding_window"] = False
    return _with(Fields(merged.values, fields.origin), SPECULATORS.name, **changes)


def _check_speculators(fields: Fields) -> None:
    if fields.get("speculators_model_type") != "dflash":
        kind = fields.get("speculators_model_type")
        fields.refuse("speculators_model_type", _no_drafter(kind if type(kind) is str else ""))
    if fields.get("architectures") is not None and architecture(fields) not in ("DFlashSpeculator", "DFlashDraftModel"):
        fields.refuse("architectures", _no_drafter(architecture(fields)))
    if fields.flag("sample_from_anchor", False):
        fields.refuse("sample_from_anchor", "DFlash v1 drafts at the mask positions only")
    if fields.get("transformer_layer_config") is None:
        fields.refuse("transformer_layer_config", "it describes the drafter's layers; download the checkpoint again")


def _taps_from_embedding(fields: Fields) -> list[int]:
    """Entry i of aux_hidden_state_layer_ids is the input of layer i, that is the output of layer i - 1."""
    ids = fields.get("aux_hidden_state_layer_ids")
    if type(ids) is not list or not ids or any(type(i) is not int or i < 1 for i in ids):
        fields.refuse("aux_hidden_state_layer_ids", "it must be a list of layer numbers >= 1; 0 is the embedding")
    return [i - 1 for i in ids]


def _model_optimizer(fields: Fields) -> Fields:
    """Model-Optimizer writes z-lab's layout. With use_swa every layer has one window and none is causal."""
    dflash = fields.child("dflash_config")
    if not dflash.flag("use_swa", False):
        if dflash.get("swa_window_size") is not None:
            dflash.refuse("swa_window_size", "it means nothing without use_swa; set use_swa, or remove it")
        return fields
    if "sliding_attention" in string_list(fields, "layer_types"):
        dflash.refuse("use_swa", "layer_types names sliding layers already; remove one of the two")
    layers = fields.integer("num_hidden_layers", high=MOST_LAYERS)
    window = dflash.integer("swa_window_size")
    # The exporter's training leaves the block itself unbounded, which is the same only for a window that holds it.
    if window < either(fields, "block_size").integer("block_size"):
        dflash.refuse("swa_window_size", "it must not be below block_size")
    changes: dict[str, Any] = {
        "layer_types": ["sliding_attention"] * layers,
        "use_sliding_window": True,
        "sliding_window": window,
    }
    if fields.get("is_causal") is None and dflash.get("causal") is None:
        changes["is_causal"] = False
    return _with(fields, "Model-Optimizer", **changes)


def either(fields: Fields, name: str) -> Fields:
    """The object that holds `name`: dflash_config, else the top level. Both are allowed if they agree."""
    dflash = fields.child("dflash_config")
    if dflash.get(name) is None:
        return fields
    if fields.get(name) is not None and fields.get(name) != dflash.get(name):
        fields.refuse(name, f"it differs from dflash_config.{name} {dflash.get(name)}; remove the wrong one")
    return dflash
