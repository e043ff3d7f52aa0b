"""What the plugin replaces, on stand-ins for the modules of vLLM and tpu-inference, which are not installed here. The
real ones: scripts/test-vllm."""

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import write_drafter

from torch_dflash import cli
from torch_dflash.errors import InputError
from torch_dflash.vllm import plugin, seams
from torch_dflash.vllm.after_import import AfterImport


class Upstream:
    """Stands for the classes whose methods are replaced."""

    def __init__(self, vllm_config: Any, runner: Any = None) -> None:
        self.vllm_config, self.runner, self.is_draft_model = vllm_config, runner, False
        self.asked: tuple[int, ...] = ()
        target = SimpleNamespace(set_aux_hidden_state_layers=self.ask)
        self.model = SimpleNamespace(vllm_model=target)
        self.step_fn_no_options = lambda: ("caches", ("hidden", ["tap"]), [], None)

    def ask(self, layers: tuple[int, ...]) -> None:
        self.asked = layers

    def load_weights(self) -> str:
        return "weights"

    def jit_step_func(self) -> Any:
        return self.step_fn_no_options

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {"target": self.vllm_config}

    def _dflash_needs_multi_kv_group(self) -> bool:
        return True

    names: tuple[str, ...] = ("DFlashDraftModel",)

    @classmethod
    def get_supported_archs(cls) -> tuple[str, ...]:
        return cls.names

    @classmethod
    def register_model(cls, name: str, stand_in: str) -> None:
        cls.names += (f"{name} as {stand_in.partition(':')[2]}",)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """All modules of the seams, with all names."""
    modules: dict[str, ModuleType] = {}
    for seam in seams.SEAMS:
        module = modules.setdefault(seam.module, ModuleType(seam.module))
        owner = seam.path.split(".")[0]
        setattr(module, owner, type(owner, (Upstream,), {}))
    modules[seams.IMPL.module].MODEL_IMPL_TYPE = "vllm"  # type: ignore[attr-defined]
    modules[seams.RESOLVE.module].resolve_model_architecture = lambda config, draft: "flax_nnx"  # type: ignore[attr-defined]
    for name, module in modules.items():
        for i in range(1, name.count(".") + 1):
            parent = ".".join(name.split(".")[:i])
            monkeypatch.setitem(sys.modules, parent, modules.get(parent, ModuleType(parent)))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(seams, "server_version", lambda: "0.26.0")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return modules


def config_of(method: str | None, draft: Path | None = None, architecture: str = "DFlashDraftModel") -> SimpleNamespace:
    model = SimpleNamespace(model=str(draft), architectures=[architecture])
    speculative = None if method is None else SimpleNamespace(method=method, draft_model_config=model)
    return SimpleNamespace(speculative_config=speculative)


def methods(installed: dict[str, ModuleType]) -> tuple[Any, Any, Any]:
    """The wrapper, the cache manager and whatever makes a proposer."""
    wrapper = installed[seams.WRAPPER].VllmModelWrapper
    return wrapper, installed[seams.CACHES.module].KVCacheManager, installed[seams.PROPOSER.module].DFlashProposer


def test_a_torch_target_hands_over_its_tapped_layers(installed: dict[str, ModuleType], tmp_path: Path) -> None:
    """vLLM counts the inputs of layers: one more, ascending. A step's second output goes where the runner looks."""
    draft = write_drafter(tmp_path)
    plugin.register()
    wrapper = methods(installed)[0](config_of("dflash", draft))
    assert wrapper.load_weights() == "weights" and wrapper.asked == (1, 2)  # taps [1, 0]
    for step in (wrapper.jit_step_func(), wrapper.step_fn_no_options):
        assert step() == ("caches", "hidden", ["tap"], None)


def test_the_drafter_has_layers_of_its_own(installed: dict[str, ModuleType]) -> None:
    """Of the target's shape; a target without a layer that attends to everything is refused."""
    plugin.register()
    drafter = SimpleNamespace(config=SimpleNamespace(layers=("first", "second")))
    runner = SimpleNamespace(vllm_config=config_of("dflash"), drafter=drafter)
    caches, full = methods(installed)[1], seams.FULL.value()(None)
    spec = caches(full, runner).get_kv_cache_spec()
    assert spec == {"target": full, "draft_layer.0": full, "draft_layer.1": full}
    with pytest.raises(InputError, match="no layer of the target"):
        caches("windowed", runner).get_kv_cache_spec()


@pytest.mark.parametrize("method", [None, "eagle3", "ngram", "dflash"])
def test_nothing_changes_for_others(method: str | None, installed: dict[str, ModuleType]) -> None:
    """No speculation, other methods, and DFlash for targets that are JAX models ("auto" resolves to that here)."""
    installed[seams.IMPL.module].MODEL_IMPL_TYPE = "auto"  # type: ignore[attr-defined]
    upstream = methods(installed)[2]
    plugin.register()
    wrapper, caches, proposer = methods(installed)
    config = config_of(method)
    assert type(proposer(config, None)) is upstream
    own = wrapper(config)
    assert own.load_weights() == "weights" and own.asked == ()
    assert own.jit_step_func()() == ("caches", ("hidden", ["tap"]), [], None)
    assert caches("spec", SimpleNamespace(vllm_config=config)).get_kv_cache_spec() == {"target": "spec"}
    assert seams.WINDOWS.owner()(config)._dflash_needs_multi_kv_group()


def test_windowed_drafters_pass_vllms_check_for_torch_targets(installed: dict[str, ModuleType]) -> None:
    plugin.register()
    assert not seams.WINDOWS.owner()(config_of("dflash"))._dflash_needs_multi_kv_group()


def test_names_are_replaced_once(installed: dict[str, ModuleType]) -> None:
    plugin.register()
    first = methods(installed)[2]
    plugin.register()
    assert methods(installed)[2] is first


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.path)
def test_a_missing_name_is_named(
    seam: seams.Seam,
    installed: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line with version, name and tested versions, and the runner's names stay as they were, but that DFlash 2 is
    refused, whose name vLLM has learnt."""
    upstream = methods(installed)[2]
    owner = seam.path.split(".")[0]
    if seam.module == seams.PROPOSER.module:
        monkeypatch.delattr(installed[seam.module], owner)
    else:
        monkeypatch.setattr(installed[seam.module], owner, SimpleNamespace())
        if "." not in seam.path:
            monkeypatch.delattr(installed[seam.module], owner)
    before = {name: dict(vars(module)) for name, module in installed.items()}
    wrapper = dict(vars(installed[seams.WRAPPER].VllmModelWrapper))
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (record,) = caplog.records
    for part in ("tpu-inference 0.26.0", seam.name, *seams.TESTED):
        assert part in record.getMessage()
    assert "\n" not in record.getMessage()
    if seam is seams.PROPOSER:
        return
    assert vars(installed[seams.WRAPPER].VllmModelWrapper) == wrapper
    proposer = vars(installed[seams.PROPOSER.module]).pop("DFlashProposer")
    del before[seams.PROPOSER.module]["DFlashProposer"]
    assert {name: dict(vars(module)) for name, module in installed.items()} == before
    assert isinstance(proposer(config_of("dflash"), None), upstream)
    with pytest.raises(InputError, match="would take it for DFlash v1"):
        proposer(config_of("dflash", architecture="DFlash2DraftModel"), None)


def test_without_vllm_the_plugin_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = list(sys.meta_path)
    assert seams.server_version() is None
    plugin.register()
    assert not caplog.records and sys.meta_path == before


def test_vllm_check(installed: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    """Every seam in a line; exit code 2 and the one line when one is missing."""
    assert cli.main(["vllm-check"]) == 0
    out = capsys.readouterr().out
    assert all(seam.name in out for seam in seams.SEAMS) and "ready: tpu-inference 0.26.0 (tested)" in out
    del installed[seams.STEP.module].VllmModelWrapper  # type: ignore[attr-defined]
    assert cli.main(["vllm-check"]) == 2
    written = capsys.readouterr()
    assert "MISSING" in written.out and seams.STEP.name in written.err and written.err.count("\n") == 1


def test_vllm_check_without_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vllm-check"]) == 2
    assert "tpu-inference is not installed" in capsys.readouterr().err


def test_the_name_of_dflash_2_is_let_through(installed: dict[str, ModuleType]) -> None:
    """Once; and not handed on to upstream's proposer, which would draft without the selector."""
    plugin.register()
    registry = installed[seams.REGISTRY.module].ModelRegistry
    assert registry.names == ("DFlashDraftModel", "DFlash2DraftModel as DFlashQwen3ForCausalLM")
    plugin.replace()
    installed[seams.IMPL.module].MODEL_IMPL_TYPE = "flax_nnx"  # type: ignore[attr-defined]
    make = methods(installed)[2]
    with pytest.raises(InputError, match=r"DFlash2DraftModel, .*: set MODEL_IMPL_TYPE=vllm"):
        make(config_of("dflash", architecture="DFlash2DraftModel"), None)
    assert isinstance(make(config_of("dflash"), None), Upstream)
    registry.names = ("DFlash2DraftModel",)  # a newer vLLM's own
    sys.meta_path = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]
    plugin.register()
    assert registry.names == ("DFlash2DraftModel",)
