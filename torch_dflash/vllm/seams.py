"""The names of tpu-inference and vLLM that the plugin replaces or calls, looked for before anything is touched."""

import importlib
import importlib.metadata
from dataclasses import dataclass
from functools import reduce
from typing import Any

TESTED = ("0.26.0",)
READ = ("0.32.0",)  # written for by its source, not run
SERVER = "tpu-inference"


@dataclass(frozen=True)
class Seam:
    """A name in a module; `path` may lead through a class. why: what happens to it, in a few words."""

    module: str
    path: str
    why: str
    replaced: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}.{self.path}"

    def owner(self) -> Any:
        """What holds the name. Raises ImportError or AttributeError when it is not there."""
        return reduce(getattr, self.path.split(".")[:-1], importlib.import_module(self.module))

    def value(self) -> Any:
        """What the name stands for. Raises ImportError or AttributeError when it is not there."""
        return getattr(self.owner(), self.path.rpartition(".")[2])

    def is_there(self) -> bool:
        """Whether the installed version has it."""
        try:
            self.value()
        except (ImportError, AttributeError):
            return False
        return True

    def put(self, value: Any) -> None:
        """Let the name stand for something else."""
        setattr(self.owner(), self.path.rpartition(".")[2], value)


PROPOSER = Seam("tpu_inference.runner.tpu_runner", "DFlashProposer", "makes this project's proposer", True)
WRAPPER = "tpu_inference.models.vllm.vllm_model_wrapper"
LOAD = Seam(WRAPPER, "VllmModelWrapper.load_weights", "asks the target for the tapped layers", True)
STEP = Seam(WRAPPER, "VllmModelWrapper.jit_step_func", "hands their outputs on", True)
CACHES = Seam(
    "tpu_inference.runner.kv_cache_manager", "KVCacheManager.get_kv_cache_spec", "adds the drafter's layers", True
)
WINDOWS = Seam(
    "vllm.config.vllm",
    "VllmConfig._dflash_needs_multi_kv_group",
    "lets drafters with windowed and full layers through: it asks for vLLM's GPU runner",
    True,
)
FULL = Seam("vllm.v1.kv_cache_interface", "FullAttentionSpec", "describes one of them")
IMPL = Seam("tpu_inference.envs", "MODEL_IMPL_TYPE", "says whether the target is a torch module")
RESOLVE = Seam("tpu_inference.models.common.model_loader", "resolve_model_architecture", 'says it for "auto"')
GIVES = Seam("vllm.model_executor.models.interfaces", "supports_eagle3", "says whether the target gives its layers")
REGISTRY = Seam("vllm.model_executor.models.registry", "ModelRegistry", "learns the name DFlash2DraftModel")
SEAMS = (PROPOSER, LOAD, STEP, CACHES, WINDOWS, FULL, IMPL, RESOLVE, GIVES, REGISTRY)


def server_version() -> str | None:
    """tpu-inference's version; None where it is not installed."""
    try:
        return importlib.metadata.version(SERVER)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing() -> list[Seam]:
    """The seams that the installed version lacks."""
    return [seam for seam in SEAMS if not seam.is_there()]


def refusal(version: str, lacking: list[Seam]) -> str:
    """One line for a version that lacks something."""
    names = ", ".join(seam.name for seam in lacking)
    known = f"tested: {', '.join(TESTED)}; written for: {', '.join(READ)}"
    needed = f"which DFlash for torch targets needs ({known})"
    return f"{SERVER} {version} has no {names}, {needed}: it serves DFlash v1 itself"
