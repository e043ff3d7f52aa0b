"""Model names -> folders. The hub's cache is laid out by hand, so nothing here needs a network."""

from pathlib import Path

import pytest
from huggingface_hub import constants

import torch_dflash
from torch_dflash.config_reader import check_pair, read_drafter_config, read_target_config
from torch_dflash.errors import InputError
from torch_dflash.hub import resolve_draft, resolve_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def cached_repo(cache: Path, name: str) -> Path:
    """The layout that huggingface_hub documents: blobs, snapshots that link to them, a ref to a snapshot."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (repo / "refs", repo / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs" / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    return snapshot


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for resolve in (resolve_target, resolve_draft):
        assert resolve(str(tmp_path)) == tmp_path
        assert resolve("owner/model") == Path("owner/model")  # a folder wins over a hub id
        assert resolve("~/owner") == tmp_path / "owner"


def test_hub_id_in_a_given_cache(tmp_path: Path) -> None:
    snapshot = cached_repo(tmp_path, "z-lab/Qwen3-4B-DFlash-b16")
    for resolve in (resolve_target, resolve_draft):
        folder = resolve("z-lab/Qwen3-4B-DFlash-b16", cache_dir=tmp_path)
        assert folder == snapshot
        assert (folder / "config.json").read_text() == "{}"


def test_hub_id_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = cached_repo(tmp_path, "c/d")
    assert resolve_target("c/d") == snapshot


def test_bytes_pair_ships_with_the_package() -> None:
    target, draft = resolve_target("bytes"), resolve_draft("bytes")
    package = Path(torch_dflash.__file__).parent
    assert target.is_relative_to(package) and draft.is_relative_to(package)
    check_pair(read_target_config(target).shape, read_drafter_config(draft))


@pytest.mark.parametrize("name", ["", "nowhere", "/no/such/folder", "./a/b", "../x", "a/b/c", "a b/c", "~nobody-x/y"])
def test_neither_folder_nor_id(name: str) -> None:
    for resolve, role in ((resolve_target, "target"), (resolve_draft, "draft")):
        with pytest.raises(InputError) as error:
            resolve(name)
        assert str(error.value).startswith(f'{role} "{name}": no such folder;')
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["owner/not-cached", "owner/bad..name", "owner/-x"])
def test_hub_id_out_of_reach(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as error:
        resolve_draft(name, cache_dir=tmp_path)
    assert f'draft "{name}"' in str(error.value)
    assert "\n" not in str(error.value)
