"""What the configs of targets and drafters share: the architecture's name, the layer's sizes, common refusals."""

from torch_dflash.config import BlockConfig
from torch_dflash.config_fields import LARGEST_HEAD, LARGEST_SIZE, Fields, string_list

_QUANTISED = ("quantization_config", "compression_config", "quantization")


def architecture(fields: Fields) -> str:
    """The one name in `architectures`, or ""."""
    names = string_list(fields, "architectures")
    return names[0] if len(names) == 1 else ""


def refuse_unsupported(fields: Fields, family: str) -> None:
    """Refuse what no layer here computes."""
    if fields.get("model_type") not in (None, family):
        fields.refuse("model_type", f"with these architectures it must be {family}")
    for name in _QUANTISED:
        if fields.get(name) is not None:
            fields.refuse(name, "quantised weights are not supported; use the unquantised checkpoint")
    if fields.get("hidden_act") not in (None, "silu"):
        fields.refuse("hidden_act", "only silu is supported")
    if family == "llama" and fields.integer("pretraining_tp", default=1) != 1:
        fields.refuse("pretraining_tp", "only 1 is supported; set it to 1, the weights are the same")
    if family == "qwen3" and fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "Qwen3 layers have no MLP bias")


def read_block(fields: Fields, family: str) -> BlockConfig:
    """The sizes of one layer."""
    hidden = fields.integer("hidden_size", high=LARGEST_SIZE)
    heads = fields.integer("num_attention_heads", high=LARGEST_HEAD)
    kv_heads = fields.integer("num_key_value_heads", default=heads, high=heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"it must divide num_attention_heads, which is {heads}")
    return BlockConfig(
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", high=LARGEST_SIZE),
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
    head_dim = fields.integer("head_dim", default=hidden // heads, high=LARGEST_HEAD)
    if head_dim % 2:
        fields.refuse("head_dim", "it must be even, since rotary embedding pairs the two halves")
    return head_dim
