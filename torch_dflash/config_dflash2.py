"""What PyPI dflash 0.1.0 has added to a drafter's config: DFlash 2's fields, and scales, which v1 may have too. Each in
dflash_config, else at the top level."""

from torch_dflash.config import Convolution, Scales, Selector
from torch_dflash.config_fields import LARGEST_SIZE, Fields
from torch_dflash.config_layouts import either

SCALE_FIELDS = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}
DFLASH_2_FIELDS = {"selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"}
MOST_CANDIDATES = 1024  # checkpoints have 16


def read_convolution(fields: Fields, block_size: int, hidden_size: int) -> Convolution:
    """Raises InputError."""
    kernel_size = either(fields, "conv_kernel_size").integer("conv_kernel_size", high=block_size)
    group = either(fields, "conv_group_size")
    group_size = group.integer("conv_group_size", high=hidden_size)
    if hidden_size % group_size:
        group.refuse("conv_group_size", f"it must divide hidden_size, which is {hidden_size}")
    return Convolution(kernel_size, group_size)


def read_selector(fields: Fields, vocab_size: int) -> Selector:
    """Raises InputError."""
    rank = either(fields, "selector_rank").integer("selector_rank", high=LARGEST_SIZE)
    most = min(vocab_size, MOST_CANDIDATES)
    return Selector(rank, either(fields, "selector_top_k").integer("selector_top_k", high=most))


def read_scales(fields: Fields) -> Scales:
    """Raises InputError."""
    bound = either(fields, "final_logit_softcapping").number("final_logit_softcapping", default=0.0, zero=True)
    return Scales(
        input_embedding=either(fields, "input_embedding_scale").number("input_embedding_scale", default=1.0),
        output=either(fields, "output_multiplier").number("output_multiplier", default=1.0),
        softcapping=bound or None,
    )
