"""config.json files for the tests of the readers: a golden one with changes."""

import json
from pathlib import Path

from torch_dflash.config_reader import read_drafter_config, read_target_config
from torch_dflash.errors import InputError

GOLDEN = Path(__file__).parent / "golden"
ABSENT = object()


def golden(pair: str, role: str) -> dict:
    return json.loads((GOLDEN / pair / role / "config.json").read_text())


def write(folder: Path, base: dict, changes: dict, generation: dict | None = None) -> Path:
    """`changes` replaces fields of `base`; ABSENT removes one; a dict for dflash_config is merged into it."""
    config = dict(base)
    for name, value in changes.items():
        if name == "dflash_config" and isinstance(value, dict):
            value = {**base[name], **value}
            value = {k: v for k, v in value.items() if v is not ABSENT}
        config[name] = value
    config = {k: v for k, v in config.items() if v is not ABSENT}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def target(folder: Path, generation: dict | None = None, base: str = "qwen3-gqa", **changes):
    return read_target_config(write(folder, golden(base, "target"), changes, generation))


def drafter(folder: Path, base: str = "qwen3-gqa", **changes):
    return read_drafter_config(write(folder, golden(base, "draft"), changes))


def assert_line(error: InputError, *parts: str) -> None:
    message = str(error)
    assert "\n" not in message
    for part in parts:
        assert part in message
