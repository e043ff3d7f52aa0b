"""Which part of each weight a device holds, when a model is spread over several (tensor parallel).

Query, key and value projections are cut by heads, the MLP by its width, embedding and head by vocabulary; the products
that follow are cut along their inputs, so that each layer needs two sums over the devices, and XLA puts them in. Norms,
and what DFlash 2 adds, are held by all.
"""

import jax

from bridge.platform import Platform, own_platform, with_mesh
from bridge.views import TURNED
from torch_dflash.config import BlockConfig, DrafterConfig, Eagle3Config, TargetConfig
from torch_dflash.errors import InputError, checked_integer

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
BY_INPUT = ("o_proj", "down_proj", "fc")


def platform_over(tp: int, dp: int) -> Platform:
    """This process's platform, each model spread over tp devices, the rows over dp groups of them. Raises InputError
    when there are not so many, or when they belong to several processes."""
    if jax.process_count() > 1:
        raise InputError(
            f"JAX runs as {jax.process_count()} processes: one process must see all devices, start one host"
        )
    tp, dp = checked_integer(tp, "tp", 1), checked_integer(dp, "dp", 1)
    if tp * dp == 1:
        return own_platform()
    devices = jax.devices()
    if tp * dp > len(devices):
        raise InputError(f"tp {tp} times dp {dp} needs {tp * dp} devices, and JAX has {len(devices)}: lower tp or dp")
    return with_mesh(own_platform(), devices, dp, tp)


def axes_of(name: str, num_axes: int) -> tuple[str | None, ...]:
    """Mesh axis of each axis of a parameter. Weights are [out, in], biases [out], with [L] before them when stacked; a
    name.T is [in, out].

    Examples: layers.0.mlp.up_proj.weight -> ("model", None); layers.mlp.up_proj.weight -> (None, "model", None).
    """
    if name.endswith(TURNED):
        *front, outputs, inputs = axes_of(name.removesuffix(TURNED), num_axes)
        return (*front, inputs, outputs)
    owner, _, kind = name.rpartition(".")
    layer = owner.rpartition(".")[2]
    own = {"weight": 2, "bias": 1}.get(kind, num_axes)
    axes: list[str | None] = [None] * num_axes
    if layer in BY_OUTPUT:
        axes[num_axes - own] = "model"
    elif layer in BY_INPUT and kind == "weight":
        axes[-1] = "model"
    return tuple(axes)


def check_divides(target: TargetConfig, draft: DrafterConfig | Eagle3Config | None, tp: int) -> None:
    """Raises InputError when a model cannot be spread over tp devices."""
    sizes = {"the target's vocab_size": target.vocab_size, **_block_sizes("the target's", target.block)}
    _refuse_uneven(sizes | ({} if draft is None else _draft_sizes(draft)), tp)


def check_drafter_divides(draft: DrafterConfig, tp: int) -> None:
    """`check_divides` of a drafter whose target others spread."""
    _refuse_uneven(_draft_sizes(draft), tp)


def _draft_sizes(draft: DrafterConfig | Eagle3Config) -> dict[str, int]:
    own_head = {} if draft.draft_vocab_size is None else {"the drafter's draft_vocab_size": draft.draft_vocab_size}
    return _block_sizes("the drafter's", draft.block) | own_head


def _refuse_uneven(sizes: dict[str, int], tp: int) -> None:
    for name, size in sizes.items():
        if size % tp:
            fitting = [n for n in range(2, tp) if not any(other % n for other in sizes.values())]
            instead = f"use {', '.join(map(str, fitting))} or 1" if fitting else "use 1"
            raise InputError(f"tp is {tp}, which does not divide {name} {size}: {instead}")


def _block_sizes(whose: str, block: BlockConfig) -> dict[str, int]:
    return {
        f"{whose} num_key_value_heads": block.num_kv_heads,
        f"{whose} num_attention_heads": block.num_heads,
        f"{whose} intermediate_size": block.intermediate_size,
        f"{whose} hidden_size": block.hidden_size,
    }
