"""Who may import whom (DESIGN, section 2), read from the source; nothing is executed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Below -> above. A file may import from its own line and from earlier ones.
LAYERS = (
    ("bridge.platform", "bridge.positions", "bridge.torchax_import", "bridge"),
    ("bridge.jnp_attention", "bridge.tpu_attention"),
    ("bridge.pages", "bridge.context", "bridge.draft_cache", "bridge.attention", "bridge.views", "bridge.vllm_pages"),
    ("torch_dflash.errors", "torch_dflash.config", "torch_dflash.metrics"),
    ("torch_dflash.config_fields", "torch_dflash.config_block", "torch_dflash.config_rope", "torch_dflash.models"),
    (
        "torch_dflash.config_layouts",
        "torch_dflash.config_dflash2",
        "torch_dflash.config_draft",
        "torch_dflash.config_eagle",
        "torch_dflash.config_reader",
    ),
    ("torch_dflash.weights", "torch_dflash.tokenizer", "torch_dflash.default_model", "torch_dflash.hub"),
    (
        "torch_dflash.reference",
        "torch_dflash.state",
        "torch_dflash.likeliest",
        "torch_dflash.sampling",
        "torch_dflash.accept",
    ),
    ("torch_dflash.stacked", "torch_dflash.sharding", "torch_dflash.block"),
    (
        "torch_dflash.verify",
        "torch_dflash.propose",
        "torch_dflash.propose_eagle",
        "torch_dflash.pair",
        "torch_dflash.decode",
    ),
    ("torch_dflash.options", "torch_dflash.requests", "torch_dflash.memory", "torch_dflash.pace"),
    ("torch_dflash.device", "torch_dflash.engine", "torch_dflash.invariants"),
    ("torch_dflash.service", "torch_dflash.api"),
    ("torch_dflash",),  # the package's own names, and what has no line above: commands, training, benchmarks
)
FILES = sorted(path for package in ("bridge", "torch_dflash") for path in (ROOT / package).rglob("*.py"))
ALL_FILES = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in the file it does so; not those for type checkers only."""
    tree = ast.parse(path.read_text())
    hidden = [ast.walk(node) for node in ast.walk(tree) if isinstance(node, ast.If) and _for_types(node)]
    skipped = {id(inner) for nodes in hidden for inner in nodes}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            found = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name if _is_module(name) else base for name in found)


def _for_types(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def layer_of(module: str) -> int:
    """The line of the longest name that the module is or lies in."""
    fitting = [(len(name), i) for i, line in enumerate(LAYERS) for name in line if f"{module}.".startswith(f"{name}.")]
    return max(fitting)[1]


def reached(module: str) -> set[str]:
    """Everything that importing a module of ours imports, our own modules followed."""
    seen, todo = set[str](), [module]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            path = ROOT / Path(*name.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            todo += list(imports(path)) if path.is_file() else []
    return seen


def outside(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@ALL_FILES
def test_nothing_imports_upward(path: Path) -> None:
    module = module_of(path)
    for name in imports(path):
        if outside({name}) <= {"bridge", "torch_dflash"}:
            assert layer_of(name) <= layer_of(module), f"{module} imports {name}"


def test_the_bridge_knows_no_model_no_tokenizer_no_config() -> None:
    for path in (ROOT / "bridge").glob("*.py"):
        assert not outside(set(imports(path))) & {"torch_dflash", "transformers", "tokenizers", "safetensors"}, path


@pytest.mark.parametrize("path", sorted((ROOT / "torch_dflash" / "models").glob("*.py")), ids=lambda path: path.stem)
def test_models_know_no_jax(path: Path) -> None:
    assert not outside(reached(module_of(path))) & {"jax", "jaxlib", "torchax", "bridge"}


def test_the_reference_knows_no_jax() -> None:
    assert not outside(reached("torch_dflash.reference")) & {"jax", "jaxlib", "torchax", "bridge"}


def test_torchax_is_imported_in_one_file() -> None:
    """Its helper is imported before torchax and may not import it."""
    users = {module_of(path) for path in FILES if "torchax" in outside(set(imports(path)))}
    assert users == {"bridge.views"}
    assert outside(set(imports(ROOT / "bridge" / "torchax_import.py"))) <= {
        *("torch", "importlib", "collections", "contextlib", "types"),
    }


def test_the_step_knows_no_host_loop_and_no_files() -> None:
    for module in ("verify", "propose", "accept", "sampling", "decode", "state"):
        known = reached(f"torch_dflash.{module}")
        assert not known & {"torch_dflash.engine", "torch_dflash.api", "torch_dflash.weights", "transformers"}


@ALL_FILES
def test_files_are_short_and_hold_no_changing_state(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 250
    tree = ast.parse(text)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.List | ast.Dict | ast.Set):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            assert isinstance(target, ast.Name)
            changed = _changed_names(tree)
            constant = target.id.lstrip("_").isupper() or target.id == "__all__"
            assert constant and target.id not in changed, f"{target.id} changes at run time"


def _changed_names(tree: ast.Module) -> set[str]:
    """Names whose items are set, or that are changed by a method."""
    items = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    ]
    calls = [
        node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    methods = {"append", "extend", "add", "update", "pop", "clear", "remove", "setdefault", "insert"}
    owners = [call.value for call in calls if call.attr in methods]
    return {node.id for node in (*items, *owners) if isinstance(node, ast.Name)}
