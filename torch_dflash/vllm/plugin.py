"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes before it loads a model.

Five names are replaced, each by a function that hands on to the one it replaces unless the method is "dflash" and the
target runs as a torch module. One is a check of vLLM's configuration; the others are replaced when the process imports
the runner, and not before: a server's front end never does, and must not start JAX, because it forks and because a TPU
belongs to one process. Besides, vLLM's registry learns the name of DFlash 2's architecture.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_dflash.config_layouts import DFLASH_2
from torch_dflash.vllm import seams
from torch_dflash.vllm.after_import import AfterImport

log = logging.getLogger("vllm.torch_dflash")

# vLLM asks every drafter's architecture for a class of its own, which is never made here.
_STAND_IN = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"


def register() -> None:
    """See to it that `replace` runs once, as soon as the runner has been imported. Does nothing without
    tpu-inference."""
    waiting = any(
        isinstance(finder, AfterImport) and seams.PROPOSER.module in finder.changes for finder in sys.meta_path
    )
    if seams.server_version() is None or waiting:
        return
    if seams.WINDOWS.is_there():
        seams.WINDOWS.put(_needs_groups(seams.WINDOWS.value()))
    if seams.REGISTRY.is_there() and DFLASH_2 not in seams.REGISTRY.value().get_supported_archs():
        seams.REGISTRY.value().register_model(DFLASH_2, _STAND_IN)
    if seams.PROPOSER.module in sys.modules:
        replace()
    else:
        sys.meta_path.insert(0, AfterImport({seams.PROPOSER.module: lambda runner: replace()}))


def replace() -> None:
    """Put the replacements in place of the other names; where one is missing, of none, and say so in one line. Even
    then DFlash 2 is refused: its name has been let through."""
    lacking = seams.missing()
    if lacking:
        log.warning(seams.refusal(str(seams.server_version()), lacking))
    if not seams.PROPOSER.is_there() or isinstance(seams.PROPOSER.value(), _Factory | _OnlyFirst):
        return
    if lacking:
        seams.PROPOSER.put(_OnlyFirst(seams.PROPOSER.value()))
        return
    seams.LOAD.put(_load_weights(seams.LOAD.value()))
    seams.STEP.put(_jit_step_func(seams.STEP.value()))
    seams.CACHES.put(_get_kv_cache_spec(seams.CACHES.value()))
    seams.PROPOSER.put(_Factory(seams.PROPOSER.value()))


def drafts_in_torch(vllm_config: Any) -> bool:
    """Whether this is the case that the plugin is for."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "dflash":
        return False
    impl = seams.IMPL.value()
    return (seams.RESOLVE.value()(vllm_config, False) if impl == "auto" else impl) == "vllm"


@dataclass(frozen=True)
class _Factory:
    """Stands for upstream's proposer class where the runner makes its proposer."""

    upstream: type

    def __call__(self, vllm_config: Any, runner: Any) -> Any:
        from torch_dflash.errors import InputError

        if not drafts_in_torch(vllm_config):
            return _OnlyFirst(self.upstream)(vllm_config, runner)
        from torch_dflash.vllm.proposer import make_proposer

        try:
            return make_proposer(self.upstream)(vllm_config, runner, setup_of(vllm_config, runner))
        except InputError as error:
            log.error("torch-dflash: %s", error)
            raise


@dataclass(frozen=True)
class _OnlyFirst:
    """Upstream's proposer class for all but DFlash 2 drafters, which it would take for DFlash v1."""

    upstream: type

    def __call__(self, vllm_config: Any, runner: Any) -> Any:
        if _is_second(vllm_config):
            from torch_dflash.errors import InputError

            reason = "tpu-inference's own proposer would take it for DFlash v1: set MODEL_IMPL_TYPE=vllm"
            refusal = f"the drafter's architectures are {DFLASH_2}, and {reason}"
            log.error("torch-dflash: %s", refusal)
            raise InputError(refusal)
        return self.upstream(vllm_config, runner)


def _is_second(vllm_config: Any) -> bool:
    """Whether the drafter is a DFlash 2 one, whose name this plugin has let through."""
    speculative = vllm_config.speculative_config
    dflash = speculative is not None and speculative.method == "dflash"
    return dflash and DFLASH_2 in speculative.draft_model_config.architectures


def setup_of(vllm_config: Any, runner: Any) -> Any:
    """The `Setup` that vLLM's configuration amounts to."""
    from torch_dflash.config import TargetShape
    from torch_dflash.vllm.pair import Setup

    model, speculative, parallel = vllm_config.model_config, vllm_config.speculative_config, vllm_config.parallel_config
    text = model.hf_text_config
    target, architecture = model.registry.resolve_model_cls(model.architectures, model)
    return Setup(
        draft=speculative.draft_model_config.model,
        num_speculative_tokens=speculative.num_speculative_tokens,
        architecture=architecture,
        shape=TargetShape(text.num_hidden_layers, model.get_hidden_size(), text.vocab_size),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        gives_hidden_states=seams.GIVES.value()(target),
        is_hybrid=model.is_hybrid,
        has_mrope=model.uses_mrope,
        dtype=str(model.dtype).removeprefix("torch."),
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        tp=runner.mesh.shape["model"],
        pp=parallel.pipeline_parallel_size,
        dp=parallel.data_parallel_size,
    )


def _needs_groups(upstream: Callable[..., bool]) -> Callable[..., bool]:
    """Here the drafter's layers are all in one cache group, windowed or not."""

    def needs(self: Any) -> bool:
        return seams.IMPL.value() != "vllm" and upstream(self)

    return needs


def _load_weights(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def load_weights(self: Any, *args: Any, **keywords: Any) -> Any:
        loaded = upstream(self, *args, **keywords)
        if drafts_in_torch(self.vllm_config) and not self.is_draft_model:
            from torch_dflash.config_reader import read_drafter_config
            from torch_dflash.hub import resolve_draft

            draft = self.vllm_config.speculative_config.draft_model_config.model
            taps = read_drafter_config(resolve_draft(draft)).target_layer_ids
            # vLLM counts the inputs of layers, z-lab and we their outputs.
            self.model.vllm_model.set_aux_hidden_state_layers(tuple(tap + 1 for tap in sorted(taps)))
        return loaded

    return load_weights


def _jit_step_func(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def jit_step_func(self: Any) -> Any:
        step = upstream(self)
        if not drafts_in_torch(self.vllm_config) or self.is_draft_model:
            return step
        self.step_fn_no_options = Split(self.step_fn_no_options)
        return Split(step)

    return jit_step_func


@dataclass(frozen=True)
class Split:
    """A step function of upstream's, whose output is (hidden states, tapped layers) when layers are tapped: it hands on
    the second where the runner looks for it."""

    step: Callable[..., Any]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        caches, output, taps, experts = self.step(*args, **keywords)
        if isinstance(output, tuple):  # not so on a stage that is not the last
            output, taps = output
        return caches, output, taps, experts

    def lower(self, *args: Any, **keywords: Any) -> Any:
        """As jax.jit's: for upstream's compilation ahead of time."""
        return self.step.lower(*args, **keywords)  # type: ignore[attr-defined]


def _get_kv_cache_spec(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache_spec(self: Any) -> Any:
        spec, runner = upstream(self), self.runner
        if not drafts_in_torch(runner.vllm_config):
            return spec
        from torch_dflash.errors import InputError
        from torch_dflash.vllm.proposer import LAYER

        full = [layer for layer in spec.values() if isinstance(layer, seams.FULL.value())]
        if not full:
            raise InputError("no layer of the target attends to its whole context, and the drafter's have to")
        return spec | {LAYER.format(i): full[0] for i in range(len(runner.drafter.config.layers))}

    return get_kv_cache_spec
