"""A stand-in for tpu-inference's runner: it schedules flat tokens, verifies with the eager target, and hands the
proposer what the real one would, with garbage wherever the contract promises nothing."""

import copy
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from helpers import Loaded
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from bridge.platform import CPU, with_mesh
from bridge.views import lower, take_params
from torch_dflash.models.target import Target
from torch_dflash.reference import draft_ids, matching_prefix, target_pass
from torch_dflash.vllm.pair import Setup
from torch_dflash.vllm.proposer import LAYER, make_proposer

GARBAGE = 77
PAGE_SIZE, PAGES_PER_ROW = 16, 6


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The fields of tpu-inference's AttentionMetadata that matter here."""

    input_positions: Array
    block_tables: Array
    seq_lens: Array
    query_start_loc: Array
    request_distribution: Array


class Upstream:
    """What the proposer derives from."""

    def __init__(self, vllm_config: Any, runner: Any) -> None:
        self.runner = runner


class ServedTarget(torch.nn.Module):
    """The target as tpu-inference wraps vLLM's module."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.vllm_model = target

    def forward(self, call_method: str, call_args: tuple, call_kwargs: dict) -> torch.Tensor:
        assert call_method == "embed_input_ids" and not call_kwargs
        return self.vllm_model.embed(*call_args)


@dataclasses.dataclass
class Request:
    """ids: prompt and what was accepted, the anchor last once the prompt is processed."""

    ids: list[int]
    prompt: int
    pages: np.ndarray
    computed: int = 0
    drafts: list[int] = dataclasses.field(default_factory=list)


def setup_for(loaded: Loaded, **changes: Any) -> Setup:
    """What a server would be told of this pair."""
    known = {
        "draft": str(loaded.folder / "draft"),
        "num_speculative_tokens": loaded.config.block_size - 1,
        "architecture": "Qwen3ForCausalLM",
        "shape": loaded.pair.target.config.shape,
        "kv_heads": loaded.config.block.num_kv_heads,
        "head_dim": loaded.config.block.head_dim,
        "gives_hidden_states": True,
        "is_hybrid": False,
        "has_mrope": False,
        "dtype": "float32",
        "cache_dtype": "auto",
        "tp": 1,
        "pp": 1,
        "dp": 1,
    }
    return Setup(**(known | changes))


class Runner:
    """One engine core with `max_rows` rows and steps of at most `max_tokens` tokens."""

    def __init__(self, loaded: Loaded, max_rows: int, max_tokens: int, devices: Sequence[Any], **changes: Any) -> None:
        self.loaded, self.max_rows, self.max_tokens = loaded, max_rows, max_tokens
        self.mesh = with_mesh(CPU, devices, 1, len(devices)).mesh
        block, layers = loaded.config.block, len(loaded.config.layers)
        self.layer_name_to_kvcache_index = {LAYER.format(i): i + 1 for i in range(layers)}
        groups = [SimpleNamespace(layer_names=names) for names in (["target's"], [*self.layer_name_to_kvcache_index])]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.tables = np.zeros((max_rows, PAGES_PER_ROW), np.int32)
        of_drafter = SimpleNamespace(get_cpu_tensor=lambda: torch.from_numpy(self.tables))
        self.input_batch = SimpleNamespace(block_table=[None, of_drafter])
        served = ServedTarget(loaded.target)
        self.model = SimpleNamespace(model=served)
        logits = lower(loaded.target, "logits")
        self.compute_logits_fn = lambda params, hidden, lora: logits(
            {name.removeprefix("vllm_model."): array for name, array in params.items()}, hidden
        )
        setup = setup_for(loaded, tp=len(devices), **changes)
        self.proposer = make_proposer(Upstream)(None, self, setup)
        params = take_params(copy.deepcopy(served))  # of a copy: `take_params` empties a module
        self.proposer.load_model(jax.device_put(params, NamedSharding(self.mesh, PartitionSpec())))
        self.requests: dict[str, Request] = {}
        self.pages = iter(np.random.default_rng(5).permutation(np.arange(1, 200)))
        trailing = ((block.num_kv_heads + 1) * (1 if block.head_dim == 64 else 2), 1, 128)  # one head more than needed
        self.kv_caches = [jnp.full((200, PAGE_SIZE, *trailing), GARBAGE, jnp.float32) for _ in range(layers + 2)]

    def add(self, name: str, prompt: Sequence[int]) -> None:
        pages = np.array([next(self.pages) for _ in range(PAGES_PER_ROW)], np.int32)
        self.requests[name] = Request(list(prompt), len(prompt), pages)

    def step(self, scheduled: dict[str, int]) -> dict[str, tuple[list[int], list[int]]]:
        """Process so many tokens of each request, rows in this order. Drafts and what they should be, by request."""
        rows = [self._verified(self.requests[name], count) for name, count in scheduled.items()]
        self._fill_tables([self.requests[name] for name in scheduled])
        drafts = self._proposed(rows)
        out = {}
        for name, row, own in zip(scheduled, rows, drafts, strict=False):
            request = self.requests[name]
            request.computed, before = row.committed, request.ids
            request.ids = [*before, *row.new_ids]
            request.drafts = own if request.computed >= request.prompt else []
            out[name] = (own, self._expected(request))
        return out

    def _verified(self, request: Request, count: int) -> SimpleNamespace:
        """One row of a step: its tokens with features, and what the target makes of them."""
        known = [*request.ids, *request.drafts]
        start, tokens = request.computed, known[request.computed : request.computed + count]
        logits, features = target_pass(self.loaded.target, known[: start + count], (0, 1))  # by ascending layer
        in_prefill = start + count < request.prompt
        accepted, new = 0, list[int]()
        if not in_prefill:
            choices = logits[len(request.ids) - 1 :].argmax(-1).tolist()
            drafts = known[len(request.ids) : start + count]
            accepted = matching_prefix(drafts, choices)
            new = choices[: accepted + 1]
        rejected = 0 if in_prefill else start + count - len(request.ids) - accepted
        return SimpleNamespace(
            start=start,
            tokens=tokens,
            features=features[start:],
            in_prefill=in_prefill,
            rejected=rejected,
            committed=start + count - rejected,
            next_prompt=known[start + count] if in_prefill else GARBAGE,
            sampled=GARBAGE if in_prefill else new[-1],
            new_ids=new,
        )

    def _fill_tables(self, requests: list[Request]) -> None:
        self.tables[:] = 1  # stale pages
        for r, request in enumerate(requests):
            self.tables[r] = request.pages

    def _proposed(self, rows: list[SimpleNamespace]) -> list[list[int]]:
        size, hidden = self.loaded.config.block.hidden_size, rows[0].features.shape[1]
        tokens = np.full(self.max_tokens, 3, np.int32)
        positions = np.zeros(self.max_tokens, np.int32)
        features = np.full((self.max_tokens, hidden), GARBAGE, np.float32)
        borders = np.cumsum([0, *(len(row.tokens) for row in rows)])
        for row, begin, end in zip(rows, borders, borders[1:], strict=False):
            tokens[begin:end], positions[begin:end] = row.tokens, row.start + np.arange(end - begin)
            features[begin:end] = row.features
        metadata = Metadata(
            jnp.array(positions),
            jnp.zeros(self.max_rows * PAGES_PER_ROW, jnp.int32),  # the target's
            self._per_row([row.start + len(row.tokens) for row in rows]),
            jnp.array(np.pad(borders, (0, self.max_rows + 1 - len(borders)), mode="edge"), jnp.int32),
            jnp.array([len(rows), len(rows), len(rows)]),
        )
        inputs = self.proposer.prepare_inputs(
            metadata,
            jnp.array(tokens),
            [jnp.array(part) for part in np.split(features, hidden // size, axis=1)],
            self._per_row([row.sampled for row in rows]),
            self._per_row([row.next_prompt for row in rows]),
            self._per_row([int(row.in_prefill) for row in rows]),
            self._per_row([row.rejected for row in rows]),
            jnp.array([len(rows)], jnp.int32),
        )
        context, ids, last, metadata = inputs
        self.kv_caches, drafts = self.proposer.propose(self.kv_caches, ids, metadata, last, context)
        return np.asarray(drafts).tolist()

    def _per_row(self, values: list[int]) -> Array:
        return jnp.array([*values, *[GARBAGE] * (self.max_rows - len(values))], jnp.int32)

    def _expected(self, request: Request) -> list[int]:
        """The drafts of a drafter that recomputes its whole context."""
        pair, context = self.loaded, request.computed
        _, features = target_pass(pair.target, request.ids[:context], pair.config.target_layer_ids)
        return draft_ids(pair.target, pair.drafter, pair.config, features, request.ids[context])
