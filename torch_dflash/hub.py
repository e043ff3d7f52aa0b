"""The name of a model -> a local folder: a folder, a shipped model, or a Hugging Face hub id."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from torch_dflash.default_model import default_target_folder
from torch_dflash.errors import InputError

_DATA = Path(__file__).parent / "data"
_DEFAULT_DRAFT = _DATA / "smollm2-135m-dflash"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# Weights, configs and tokenizers that are text. Never pickles, never code.
_ALLOWED = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]


def resolve_target(name: str, cache_dir: Path | None = None) -> Path:
    """The folder of target `name`: "default", "bytes", a local folder, or a hub id (downloaded into the hub's cache, or
    into `cache_dir`). Raises InputError."""
    if name == "default":
        return default_target_folder()
    return _bytes_folder("target") if name == "bytes" else _folder_or_hub(name, "target", cache_dir)


def resolve_draft(name: str, cache_dir: Path | None = None) -> Path:
    """The folder of drafter `name`; the same names as `resolve_target`. Raises InputError."""
    if name == "default":
        if not (_DEFAULT_DRAFT / "config.json").is_file():
            raise InputError(f'draft "default": {_DEFAULT_DRAFT} is not there; use "bytes", a folder or a hub id')
        return _DEFAULT_DRAFT
    return _bytes_folder("draft") if name == "bytes" else _folder_or_hub(name, "draft", cache_dir)


def _bytes_folder(role: str) -> Path:
    """The byte-level pair that ships with the package."""
    return _DATA / "bytes-pair" / role


def _folder_or_hub(name: str, role: str, cache_dir: Path | None) -> Path:
    folder = Path.home() / name[2:] if name.startswith("~/") else Path(name)
    if name and len(name) < 4096 and folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "/", "~")):
        raise InputError(f'{role} "{name}": no such folder; give a folder, a hub id (owner/name), or "default"')
    return _download(name, role, cache_dir)


def _download(name: str, role: str, cache_dir: Path | None) -> Path:
    try:
        # Subfolders hold other formats of the same weights.
        path = snapshot_download(name, cache_dir=cache_dir, allow_patterns=_ALLOWED, ignore_patterns=["*/*"])
    except GatedRepoError:
        reason = "access is restricted; ask for it on the model's page, then run `hf auth login`"
    except RepositoryNotFoundError:
        reason = "neither a folder here nor a model on the Hugging Face hub; check it (private: `hf auth login`)"
    except LocalEntryNotFoundError:
        reason = "no such folder, and not in the hub's cache while the hub is out of reach; check the network"
    except Exception as error:  # the hub's HTTP library and its errors differ between versions
        reason = f"cannot be fetched from the Hugging Face hub ({' '.join(str(error).split())}); try again"
    else:
        return Path(path)
    raise InputError(f'{role} "{name}": {reason}')
