"""What a pass over a model must move and compute at least, and how long a chip needs for that. Arithmetic only.

Everything is bfloat16. Activations and logits are taken to stay on the chip, and exchange between chips is not counted.
Letters: R rows, T query tokens of a row, C context (positions before them), B block_size, F tapped layers, D hidden
size, L layers, K key/value heads, d head_dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bridge.platform import TPU
from torch_dflash.config import BlockConfig, DrafterConfig, DraftLayer, Selector, TargetConfig
from torch_dflash.tpu.chips import Chip

BYTES = 2  # of a bfloat16
K_FLAT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters. layers: all decoder layers. embedding: the table. head: an output matrix that is not the
    embedding. rest: the final norm; of a drafter also the projection of features and its norm. kernels, codebooks: of
    DFlash 2's convolutions, with the selector's projection, and of its selector."""

    layers: int
    embedding: int
    head: int
    rest: int
    kernels: int = 0
    codebooks: int = 0

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head + self.rest + self._whole

    def bytes_of(self, tp: int) -> float:
        """What each of tp chips holds: a share of the matrices, and what DFlash 2 adds."""
        return ((self.total - self._whole) / tp + self._whole) * BYTES

    @property
    def _whole(self) -> int:
        return self.kernels + self.codebooks


@dataclass(frozen=True)
class Work:
    """Of one program, on all its chips together: bytes from and to HBM, and floating point operations.

    weights: matrices, once for each time they are needed. kv_read, written: live K/V, and what is new. rows_read:
    rows of embedding and codebooks, and features.
    """

    weights: float
    kv_read: float
    rows_read: float
    written: float
    flops: float

    @property
    def hbm_bytes(self) -> float:
        return self.weights + self.kv_read + self.rows_read + self.written

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Time:
    """Seconds that the memory and the multipliers need; the roofline is the longer of the two."""

    memory: float
    compute: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute)


@dataclass(frozen=True)
class KFlat:
    """A verification of `tokens` query tokens."""

    tokens: int
    time: Time


def block_matrices(block: BlockConfig) -> int:
    """Parameters in the matrices of one layer: they all multiply each token."""
    attention = 2 * block.num_heads * block.head_dim + 2 * block.num_kv_heads * block.head_dim
    return block.hidden_size * (attention + 3 * block.intermediate_size)


def block_parameters(block: BlockConfig) -> int:
    """All parameters of one layer: matrices, biases and norms."""
    heads, kv_heads = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    biases = (heads + 2 * kv_heads + block.hidden_size) * block.attention_bias
    biases += (2 * block.intermediate_size + block.hidden_size) * block.mlp_bias
    return block_matrices(block) + biases + 2 * block.hidden_size + 2 * block.head_dim * block.qk_norm


def target_parameters(config: TargetConfig) -> Parameters:
    """A tied head is the embedding."""
    table = config.vocab_size * config.block.hidden_size
    head = 0 if config.tie_word_embeddings else table
    return Parameters(config.num_layers * block_parameters(config.block), table, head, config.block.hidden_size)


def drafter_parameters(config: DrafterConfig) -> Parameters:
    """What the config tells: an embedding of its own is in the weights only, and not counted."""
    hidden, layers = config.block.hidden_size, len(config.layers)
    head = (config.draft_vocab_size or 0) * hidden
    rest, kernels, codebooks = len(config.target_layer_ids) * hidden**2 + 2 * hidden, 0, 0
    if config.convolution is not None:
        groups = hidden // config.convolution.group_size
        kernels = layers * 2 * 2 * config.convolution.kernel_size * hidden * (1 + groups)
    if config.selector is not None:
        kernels += config.selector.rank * hidden
        codebooks = 2 * (config.vocab_size or 0) * config.selector.rank
    return Parameters(layers * block_parameters(config.block), 0, head, rest, kernels, codebooks)


def kv_bytes(block: BlockConfig, layers: int, tp: int = 1) -> int:
    """Bytes of one position in the K/V pages of `layers` layers, on all tp chips together. Each chip's heads are padded
    as TPUs want them."""
    heads = tp * TPU.stored_heads(block.num_kv_heads // tp)
    return layers * 2 * heads * TPU.stored_dim(block.head_dim) * BYTES


def feature_bytes(config: DrafterConfig) -> int:
    """Bytes of one position's features."""
    return len(config.target_layer_ids) * config.block.hidden_size * BYTES


def target_pass(config: TargetConfig, rows: int, tokens: int, context: int, features: int = 0) -> Work:
    """A causal pass over `tokens` tokens of each row, the head on all of them: one is a plain step, B a verification.

    features: bytes that are kept of each position for the drafter. The K/V of the block itself is written and read.
    """
    block, queries = config.block, rows * tokens
    parameters = target_parameters(config)
    head = config.vocab_size * block.hidden_size
    keys = tokens * context + tokens * (tokens + 1) / 2
    per_position = kv_bytes(block, config.num_layers)
    return Work(
        weights=(parameters.layers + parameters.rest + head) * BYTES,
        kv_read=rows * (context + tokens) * per_position,
        rows_read=queries * block.hidden_size * BYTES,
        written=queries * (per_position + features),
        flops=2 * queries * (config.num_layers * block_matrices(block) + head)
        + config.num_layers * _attention_flops(block, rows * keys),
    )


def draft_pass(target: TargetConfig, config: DrafterConfig, rows: int, context: int) -> Work:
    """Absorbing the features of B positions, then the pass over the block of B, then the head on B - 1 of it.

    The head is the target's, unless the drafter has its own. B positions are an upper bound for what a step commits.
    """
    block, size, queries = config.block, config.block_size, rows * config.block_size
    parameters = drafter_parameters(config)
    head = (config.draft_vocab_size or target.vocab_size) * block.hidden_size
    one_layer = kv_bytes(block, 1)
    visible = [_keys_read(layer, context) for layer in config.layers]
    projections = 2 * block.hidden_size * block.num_kv_heads * block.head_dim * len(config.layers)
    dense = len(config.layers) * block_matrices(block) + parameters.rest - 2 * block.hidden_size + projections
    dense += parameters.kernels
    rows_of_codebooks, edges = (0, 0) if config.selector is None else _edges(config.selector, rows * (size - 1))
    pairs = sum(_pairs(layer, context, size) for layer in config.layers)
    return Work(
        weights=(parameters.layers + parameters.rest + parameters.kernels + head) * BYTES,
        kv_read=rows * sum(visible) * one_layer,
        rows_read=queries * (block.hidden_size * BYTES + feature_bytes(config)) + rows_of_codebooks * BYTES,
        written=queries * len(config.layers) * one_layer,
        flops=2 * queries * dense + 2 * rows * (size - 1) * head + _attention_flops(block, rows * pairs) + edges,
    )


def _edges(selector: Selector, places: int) -> tuple[int, int]:
    """Codebook values read, and flops, for the edges between all candidates of neighbours, at so many positions."""
    read = 2 * places * selector.top_k * selector.rank
    return read, read * selector.top_k


def dflash_step(target: TargetConfig, drafter: DrafterConfig, rows: int, context: int) -> Work:
    """The fused step: draft, then verify. A head that both use is read twice: the second pass begins with the answer of
    the first, and the matrix does not fit on the chip in between."""
    verified = target_pass(target, rows, drafter.block_size, context, feature_bytes(drafter))
    return draft_pass(target, drafter, rows, context) + verified


def time_of(work: Work, chip: Chip, tp: int = 1) -> Time:
    """On `tp` chips, each with its equal share of weights, K/V and work."""
    memory = work.hbm_bytes / (tp * chip.hbm_bytes_per_second)
    return Time(memory, work.flops / (tp * chip.flops_per_second))


def k_flat(
    config: TargetConfig,
    chip: Chip,
    context: int,
    tokens: Iterable[int] = K_FLAT_TOKENS,
    *,
    rows: int = 1,
    tp: int = 1,
) -> tuple[KFlat, ...]:
    """What a verification costs against its number of query tokens."""
    return tuple(KFlat(t, time_of(target_pass(config, rows, t, context), chip, tp)) for t in tokens)


def knee(config: TargetConfig, chip: Chip, context: int, *, rows: int = 1, most: int = 2**20) -> int | None:
    """The least number of query tokens of a row with which computing takes longer than the memory; None above `most`.

    tp does not move it. Both grow with the tokens, but the memory by less: bisection.
    """

    def compute_bound(tokens: int) -> bool:
        time = time_of(target_pass(config, rows, tokens, context), chip)
        return time.compute > time.memory

    if not compute_bound(most):
        return None
    low, high = 0, most  # not bound, bound
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_bound(middle) else (middle, high)
    return high


def _attention_flops(block: BlockConfig, pairs: float) -> float:
    """Of one layer: scores and weighted values of `pairs` (query, visible key) pairs, all heads."""
    return 4 * pairs * block.num_heads * block.head_dim


def _keys_read(layer: DraftLayer, context: int) -> int:
    """Context positions that some query of the block sees: a window of W reaches back W - 1 from the first."""
    return context if layer.window is None else min(context, layer.window - 1)


def _pairs(layer: DraftLayer, context: int, size: int) -> float:
    """(query, visible key) pairs of the block: context and block."""
    return sum(_visible(layer, context, size, query) for query in range(size))


def _visible(layer: DraftLayer, context: int, size: int, query: int) -> int:
    """Keys that the block's query number `query` sees."""
    reach = context + size if layer.window is None else layer.window - 1
    ahead = 0 if layer.causal else min(reach, size - 1 - query)
    return min(reach, context + query) + 1 + ahead
