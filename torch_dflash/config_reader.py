"""config.json -> the dataclasses of config.py. The config_*.py files are the only readers of checkpoint key names.

What changes the mathematics is read, checked, or refused by name. Absent fields follow Hugging Face's rules for the
family, where these are not in doubt.
"""

from pathlib import Path

from torch_dflash.config import DrafterConfig, TargetConfig, TargetShape
from torch_dflash.config_block import architecture, read_block, refuse_unsupported
from torch_dflash.config_draft import read_draft
from torch_dflash.config_fields import LARGEST_SIZE, MOST_LAYERS, Fields, load_fields, string_list
from torch_dflash.config_layouts import SPECULATORS, zlab_fields
from torch_dflash.config_rope import read_rope
from torch_dflash.errors import InputError

_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_RECURRENT = (  # parts of the names of architectures, in lower case; many of these are mixtures of experts as well
    *("qwen3next", "qwen3_5", "qwen3.5", "mamba", "jamba", "bamba", "zamba", "falconh1", "nemotronh", "rwkv", "lfm2"),
    *("granitemoehybrid", "kimilinear", "recurrentgemma", "olmohybrid"),
)
_EXPERTS = ("moe", "mixtral", "deepseek", "gptoss", "dbrx", "kimi", "llama4")
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
_RECURRENT_LAYERS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid")
_NO_RECURRENT = "hybrid and recurrent targets are not supported: their state cannot be rolled back yet"
_NO_EXPERTS = "mixture-of-experts targets are not supported"


def read_target_config(folder: Path) -> TargetConfig:
    """Reads `folder`/config.json and generation_config.json of a Llama or Qwen3 target. Raises InputError."""
    fields = load_fields(folder / "config.json")
    family = _family(fields)
    refuse_unsupported(fields, family)
    _refuse_other_layers(fields)
    _refuse_quantised_folder(folder)
    block = read_block(fields, family)
    return TargetConfig(
        architecture=family,
        block=block,
        num_layers=fields.integer("num_hidden_layers", high=MOST_LAYERS),
        vocab_size=fields.integer("vocab_size", high=LARGEST_SIZE),
        rope=read_rope(fields),
        context_limit=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(fields, folder / "generation_config.json"),
    )


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Reads `folder`/config.json of a DFlash drafter, in any of the layouts of config_layouts.py. Raises
    InputError."""
    fields, layout = zlab_fields(load_fields(folder / "config.json"))
    _refuse_quantised_folder(folder)
    return read_draft(fields, layout)


def stated_window(folder: Path) -> int | None:
    """The sliding_window that `folder`/config.json of a drafter states; whether it is in use, other fields say."""
    fields = load_fields(folder / "config.json")
    return None if fields.get("sliding_window") is None else fields.integer("sliding_window")


def check_pair(target: TargetShape, drafter: DrafterConfig) -> None:
    """Raises InputError, naming the drafter's field, unless the drafter fits a target of this shape."""
    other = "this drafter was made for another target, use the one for this target"
    same = [
        ("num_target_layers", drafter.num_target_layers, "num_hidden_layers", target.num_layers),
        ("hidden_size", drafter.block.hidden_size, "hidden_size", target.hidden_size),
        ("vocab_size", drafter.vocab_size, "vocab_size", target.vocab_size),
    ]
    for name, value, target_name, wanted in same:
        if value is not None and value != wanted:
            raise InputError(f"drafter {name} is {value}, but the target's {target_name} is {wanted}; {other}")
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        limit = f"the target's vocab_size is {target.vocab_size}"
        raise InputError(f"drafter mask_token_id is {drafter.mask_token_id}, but {limit}; {other}")
    ids = drafter.target_layer_ids
    if not ids or len(set(ids)) < len(ids) or not all(0 <= i < target.num_layers for i in ids):
        allowed = f"they must be distinct layers 0..{target.num_layers - 1} of the target"
        raise InputError(f"drafter target_layer_ids are {list(ids)}; {allowed}")
    if drafter.layout == SPECULATORS and target.num_layers - 1 in ids:
        # vLLM, which records these features for training, takes the last layer's output before the final norm.
        reason = "the last layer's output without the final norm, which is not tapped here"
        raise InputError(f"drafter aux_hidden_state_layer_ids name {target.num_layers}, {reason}; use another drafter")


def _family(fields: Fields) -> str:
    name = architecture(fields)
    if name not in _FAMILIES:
        kinds = ((_RECURRENT, _NO_RECURRENT), (_EXPERTS, _NO_EXPERTS))
        reasons = [reason for parts, reason in kinds if any(part in name.lower() for part in parts)]
        fields.refuse("architectures", "; ".join([*reasons[:1], f"the target must be one of {', '.join(_FAMILIES)}"]))
    return _FAMILIES[name]


def _refuse_other_layers(fields: Fields) -> None:
    for name in _EXPERT_FIELDS:
        if fields.get(name) not in (None, 0):
            fields.refuse(name, _NO_EXPERTS)
    for layer_type in string_list(fields, "layer_types"):
        if layer_type in _RECURRENT_LAYERS:
            fields.refuse("layer_types", _NO_RECURRENT)
        if layer_type != "full_attention":
            fields.refuse("layer_types", "a target with layers other than full_attention is not supported")
    if fields.flag("use_sliding_window", False):
        fields.refuse("use_sliding_window", "a target with sliding-window attention is not supported")


def _refuse_quantised_folder(folder: Path) -> None:
    path = folder / "hf_quant_config.json"
    if path.exists():
        raise InputError(f"{path}: quantised weights are not supported; use the unquantised checkpoint")


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
