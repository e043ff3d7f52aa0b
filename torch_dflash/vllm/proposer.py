"""The drafter as tpu-inference's speculative decoding manager calls it: prepare_inputs, then propose.

The class is made from upstream's, because the manager insists on an instance of that.

Letters: see step.py.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridge.platform import Platform, own_platform
from bridge.positions import block_positions
from bridge.views import Params, call_foreign
from torch_dflash.errors import InputError
from torch_dflash.vllm.pair import Setup, load_served, served_config
from torch_dflash.vllm.step import Batch, Context, Served, propose_program, take_context

LAYER = "draft_layer.{}"  # names of the drafter's layers among vLLM's K/V caches


@dataclasses.dataclass(frozen=True)
class RunnerEnds:
    """The target's embedding and head as the runner has them: tied, untied, padded or spread."""

    runner: Any

    def embed(self, params: Params, ids: Array) -> Array:
        flat = (ids.reshape(-1),)
        call = {"call_method": "embed_input_ids", "call_args": flat, "call_kwargs": {}}
        rows = call_foreign(self.runner.model.model, params, **call)
        return rows.reshape(*ids.shape, rows.shape[-1])

    def logits(self, params: Params, hidden: Array) -> Array:
        logits = self.runner.compute_logits_fn(params, hidden.reshape(-1, hidden.shape[-1]), None)
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])


def platform_of(mesh: Any) -> Platform:
    """This process's platform over the runner's mesh. Raises InputError if anything but "model" is spread."""
    spread = {name: size for name, size in mesh.shape.items() if size > 1 and name != "model"}
    if spread or not {"data", "model"} <= set(mesh.axis_names):
        raise InputError(f"the device mesh is {dict(mesh.shape)}: DFlash is spread over tensor_parallel_size only")
    return dataclasses.replace(own_platform(), mesh=mesh)


class TorchDFlash:
    """`prepare_inputs` says what context is new; `propose` takes it up and drafts a block for every row.
    Upstream's class is behind it: see `make_proposer`."""

    runner: Any  # upstream keeps it

    def __init__(self, vllm_config: Any, runner: Any, setup: Setup) -> None:
        """Checks everything before any weights move. Raises InputError."""
        self.setup, self.config = setup, served_config(setup)
        self.platform = platform_of(runner.mesh)
        super().__init__(vllm_config, runner)  # type: ignore[call-arg]
        self.block_size = self.config.block_size
        self.mask_token_id = self.config.mask_token_id

    def load_model(self, target_model: Params) -> None:
        """Load the drafter's weights; target_model: the target's, as vLLM names them."""
        functions, self.state = load_served(self.setup, self.config, self.platform)
        self.target_state = target_model
        served = Served(functions, RunnerEnds(self.runner), self.setup.num_speculative_tokens, self.platform)
        hidden, whole = self.platform.sharding(None, "model"), self.platform.sharding()
        self._take_context = jax.jit(partial(take_context, served), out_shardings=Context(hidden, whole, whole, whole))
        self._anchors = jax.jit(partial(_noise, self.block_size, self.mask_token_id), out_shardings=whole)
        self._propose = propose_program(served)

    def prepare_inputs(
        self,
        attn_metadata: Any,
        input_ids: Array,
        aux_hidden_states: Sequence[Array],
        last_sampled_token_id: Array,
        next_prompt_token_id: Array,
        is_in_prefill: Array,
        num_rejected_tokens: Array,
        num_reqs_dp: Array,
    ) -> tuple[tuple[Array, Array, Array], Array, Array, Any]:
        """See VLLM's contract: the new context (projected features [T,E], row borders int32[R+1], positions
        int32[T], -1 where a draft was rejected), the noise block's ids int32[R*B], last_token_indices (unused),
        and metadata with committed lengths and the drafter's block tables."""
        md = attn_metadata
        batch = Batch(md.query_start_loc, md.seq_lens, md.input_positions, num_rejected_tokens, num_reqs_dp)
        context = self._take_context(self.state, batch, tuple(aux_hidden_states))
        ids, positions = self._anchors(is_in_prefill, next_prompt_token_id, last_sampled_token_id, context.length)
        drafting = dataclasses.replace(
            md, input_positions=positions, seq_lens=context.length, block_tables=self._block_tables()
        )
        return (context.hidden, context.query_start, context.positions), ids, context.length, drafting

    def propose(
        self,
        kv_caches: list[Array],
        input_ids: Array,
        attn_metadata: Any,
        last_token_indices: Array,
        target_hidden_states: tuple[Array, Array, Array],
    ) -> tuple[list[Array], Array]:
        """All caches, the drafter's with the context taken up, and draft_ids int32[R,K]."""
        length = attn_metadata.seq_lens
        anchor, tables = input_ids.reshape(len(length), -1)[:, 0], attn_metadata.block_tables
        context = Context(*target_hidden_states, length)
        at = self._cache_indices()
        pools, ids = self._propose(
            self.state,
            self.target_state,
            pools=[kv_caches[i] for i in at],
            tables=tables.reshape(len(length), -1),
            context=context,
            anchor=anchor,
        )
        for i, pool in zip(at, pools, strict=True):
            kv_caches[i] = pool
        return kv_caches, ids

    def _cache_indices(self) -> list[int]:
        where = self.runner.layer_name_to_kvcache_index
        return [where[LAYER.format(i)] for i in range(len(self.config.layers))]

    def _block_tables(self) -> Array:
        """int32[R*M] of the cache group that holds the drafter's layers."""
        groups, layer = self.runner.kv_cache_config.kv_cache_groups, LAYER.format(0)
        own = next(number for number, group in enumerate(groups) if layer in group.layer_names)
        tables = np.asarray(self.runner.input_batch.block_table[own].get_cpu_tensor()).reshape(-1)
        return jax.device_put(tables.copy(), self.platform.sharding("data"))  # the host's array lives on


def make_proposer(upstream: type) -> type:
    """The proposer class, an heir of upstream's DFlashProposer."""
    return type("TorchDFlashProposer", (TorchDFlash, upstream), {})


def _noise(
    block_size: int, mask_token_id: int, in_prefill: Array, next_prompt: Array, last_sampled: Array, length: Array
) -> tuple[Array, Array]:
    """Ids and positions of every row's noise block, each int32[R*B]: behind a part of a prompt its next token, else the
    sampled one, and masks."""
    anchor = jnp.where(in_prefill > 0, next_prompt, last_sampled)[:, None]
    ids = jnp.pad(anchor, ((0, 0), (0, block_size - 1)), constant_values=mask_token_id)
    return ids.reshape(-1), block_positions(length, block_size).reshape(-1)
