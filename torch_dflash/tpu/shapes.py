"""The name of a configuration -> the folder of its config.json. Weights are not needed, and nothing is downloaded."""

from pathlib import Path

from torch_dflash.errors import InputError

_DATA = Path(__file__).parent.parent / "data"
TARGETS = ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "HuggingFaceTB/SmolLM2-135M-Instruct")
DRAFTERS = (
    "z-lab/Qwen3-4B-DFlash-b16",
    "z-lab/Qwen3-8B-DFlash-b16",
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
)
# Names of hub.py -> folders. The default target's is a copy of its shape: the model itself must be converted first.
_SHIPPED = {
    ("target", "default"): _DATA / "shapes" / "SmolLM2-135M-Instruct",
    ("target", "bytes"): _DATA / "bytes-pair" / "target",
    ("draft", "default"): _DATA / "smollm2-135m-dflash",
    ("draft", "bytes"): _DATA / "bytes-pair" / "draft",
}


def target_folder(name: str) -> Path:
    """Where target `name` has its config.json: a folder, a config.json, a name of TARGETS (in any case, with or without
    the owner), "default" or "bytes". Raises InputError."""
    return _folder(name, "target", TARGETS)


def drafter_folder(name: str) -> Path:
    """Like `target_folder`, for the names of DRAFTERS."""
    return _folder(name, "draft", DRAFTERS)


def drafter_of(target: str) -> str | None:
    """The built-in drafter for a built-in target; None for others."""
    if ("draft", target) in _SHIPPED:
        return target
    place = _place(target, TARGETS)
    return None if place is None else (*DRAFTERS, "default")[place]


def _folder(name: str, role: str, built_in: tuple[str, ...]) -> Path:
    if (role, name) in _SHIPPED:
        return _SHIPPED[role, name]
    path = _existing(name)
    if path is not None:
        return path if path.is_dir() else _folder_of_file(path, role)
    place = _place(name, built_in)
    if place is None:
        known = ", ".join((*built_in, "default", "bytes"))
        raise InputError(f'{role} "{name}": no such folder or config.json; built in are {known}')
    return _DATA / "shapes" / built_in[place].partition("/")[2]


def _existing(name: str) -> Path | None:
    path = Path.home() / name[2:] if name.startswith("~/") else Path(name)
    try:
        return path if name and path.exists() else None
    except (OSError, ValueError):  # a name that no file can have: too long, or with a null byte
        return None


def _folder_of_file(path: Path, role: str) -> Path:
    if path.name != "config.json":
        raise InputError(f'{role} "{path}": the file must be called config.json; rename it, or name its folder')
    return path.parent


def _place(name: str, built_in: tuple[str, ...]) -> int | None:
    """Where `name` stands among the built-in ones."""
    for place, known in enumerate(built_in):
        if name.lower() in (known.lower(), known.lower().partition("/")[2]):
            return place
    return None
