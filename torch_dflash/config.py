"""What a checkpoint says about itself. config_reader.py fills these in, once, and checks them.

Letters: L layers, F number of tapped layers, B block_size.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DefaultRope:
    """Rotary embedding without scaling. `theta` is the base."""

    theta: float


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1 frequency scaling (HF `rope_type: llama3`)."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN scaling (HF `rope_type: yarn`). `attention_factor` is resolved by the reader: cos and sin are multiplied by
    it."""

    theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


Rope = DefaultRope | Llama3Rope | YarnRope


@dataclass(frozen=True)
class BlockConfig:
    """What one decoder layer needs to know; the target and the drafter share it."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must fit."""

    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class TargetConfig:
    """A Llama or Qwen3 target. `context_limit` is max_position_embeddings: positions 0..context_limit-1 exist."""

    architecture: str  # "llama" or "qwen3"
    block: BlockConfig
    num_layers: int
    vocab_size: int
    rope: Rope
    context_limit: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def shape(self) -> TargetShape:
        return TargetShape(self.num_layers, self.block.hidden_size, self.vocab_size)


@dataclass(frozen=True)
class DraftLayer:
    """Visibility inside one drafter layer. `window` None: all context; else query q sees key k only if |q - k| <
    window."""

    causal: bool
    window: int | None


@dataclass(frozen=True)
class Convolution:
    """DFlash 2's convolutions around attention and MLP: `kernel_size` positions of the block, this one included;
    `group_size` channels share the part of a kernel that depends on the input."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class Selector:
    """DFlash 2's choice among the `top_k` likeliest tokens of each position, in view of the token chosen before.
    `rank`: width of its codebooks."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class Scales:
    """Of noise embeddings, and of logits: multiplied, then bounded to -softcapping..softcapping by tanh (None: not).
    From `dflash` 0.1.0 on, in v1 and DFlash 2."""

    input_embedding: float = 1.0
    output: float = 1.0
    softcapping: float | None = None


@dataclass(frozen=True)
class Layout:
    """How the checkpoints of one project name their tensors, where that differs from z-lab's names.

    renames: (their name, ours). unused: tensors that served training and take no part in drafting.
    """

    name: str
    renames: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()


ZLAB = Layout("z-lab")
EAGLE3 = Layout("EAGLE-3", unused=("t2d",))  # the inverse of d2t as a mask


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head: one layer that drafts a token at a time. `target_layer_ids` are the low, middle and high tap."""

    block: BlockConfig
    rope: Rope
    target_layer_ids: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    context_limit: int


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter. `layers` has one entry per layer; `target_layer_ids` are taps, in feature order.

    num_target_layers, vocab_size: of the target; None where the layout does not say.
    draft_vocab_size: rows of the drafter's own head; None where the target's head serves.
    convolution, selector: None in DFlash v1; DFlash 2 has both.
    """

    block: BlockConfig
    layers: tuple[DraftLayer, ...]
    rope: Rope
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int | None
    context_limit: int
    draft_vocab_size: int | None = None
    layout: Layout = ZLAB
    convolution: Convolution | None = None
    selector: Selector | None = None
    scales: Scales = Scales()
