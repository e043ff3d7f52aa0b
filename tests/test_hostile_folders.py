"""Folders that lead elsewhere, hold pickles or code, or a damaged tokenizer."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import BYTES_PAIR
from hostile_files import REFUSED, SAME, load, outcome
from layout_files import tensors_of
from safetensors.torch import save_file

from torch_dflash import InputError, Pair

INDEX = "model.safetensors.index.json"
NAME = "norm.weight"


def shards(folder: Path) -> dict[str, str]:
    """Splits the weights in two; returns the index's map."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == shard}, folder / shard)
    return weight_map


def test_an_index_leads_nowhere_else(copy: Path, base: Pair) -> None:
    """What it points to outside is a good shard, which would load."""
    folder = copy / "draft"
    weight_map = shards(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert outcome(copy, base) == SAME
    inside = weight_map[NAME]
    shutil.move(folder / inside, copy / inside)
    (folder / "sub").mkdir()
    shutil.copy(copy / inside, folder / "sub")
    outside = str(copy / inside)
    tricks = ["../" + inside, "./../" + inside, "sub/" + inside, "sub/../../" + inside, outside, "/" + outside]
    tricks += ["~/" + inside, "file://" + outside, "..\\" + inside, "", ".", "..", "/", "*.safetensors"]
    tricks += [inside + "\0", "\0", "x" * 5000 + ".safetensors", "\ud800.safetensors", "a\nb.safetensors"]
    tricks += ["config.json", "../target/model.safetensors", "/etc/passwd", "/dev/zero", "/proc/self/mem"]
    for shard in [*tricks, None, 3, 1.5, True, [], [inside], {}, {"file": inside}]:
        changed = {name: shard if place == inside else place for name, place in weight_map.items()}
        (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
        assert outcome(copy, base) == REFUSED, shard


def test_links(copy: Path, base: Pair) -> None:
    """The owner of the folder may link weights, as the hub's cache does; what is there must be weights."""
    folder = copy / "draft"
    weight_map = shards(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    path = folder / weight_map[NAME]
    shutil.move(path, copy / "blob")
    path.symlink_to(copy / "blob")
    assert outcome(copy, base) == SAME
    for place in ("/etc/passwd", "/dev/zero", "/proc/self/mem", copy, copy / "nowhere", path):
        path.unlink()
        path.symlink_to(place)
        assert outcome(copy, base) == REFUSED, place
    path.unlink()
    os.mkfifo(path)
    assert outcome(copy, base) == REFUSED


def test_an_index_that_is_none(copy: Path, base: Pair) -> None:
    folder = copy / "draft"
    good = json.dumps({"weight_map": shards(folder)})
    contents = ["", "null", "[]", "{", "{}", '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": {}}']
    contents += ['{"weight_map": "model.safetensors"}', good[:-2], good + "}", "\ufeff" + good]
    contents += [good[:-2] + f', "{NAME}": "x.safetensors"}}}}', '{"weight_map": ' + "[" * 100000, "\x00"]
    for content in contents:
        (folder / INDEX).write_text(content)
        assert outcome(copy, base) == REFUSED, content[:80]
    (folder / INDEX).write_bytes(b"\xff" + good.encode())
    assert outcome(copy, base) == REFUSED
    (folder / INDEX).write_text(good)
    assert outcome(copy, base) == SAME


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def test_no_pickle_is_loaded(copy: Path, base: Pair) -> None:
    marker, path = copy / "ran", copy / "draft" / "model.safetensors"
    content = pickle.dumps(Payload(marker))
    for name in ("pytorch_model.bin", "model.bin", "model.pt"):  # beside the weights they are not looked at
        (copy / "draft" / name).write_bytes(content)
    assert outcome(copy, base) == SAME
    path.write_bytes(content)
    assert outcome(copy, base) == REFUSED
    path.unlink()
    assert outcome(copy, base) == REFUSED
    with pytest.raises(InputError, match=r"holds only pytorch \.bin weights, which are never read"):
        load(copy)
    assert not marker.exists()


TEXT = "def f():"
CODE = """
from pathlib import Path
(Path({marker!r})).mkdir()
from transformers import PreTrainedTokenizerFast as Evil, PretrainedConfig as EvilConfig
"""


def test_no_code_of_a_folder_runs(tmp_path: Path) -> None:
    """config.json and tokenizer_config.json name classes in the folder's own modules."""
    folder, marker = shutil.copytree(BYTES_PAIR, tmp_path / "pair"), tmp_path / "ran"
    base = load(folder)
    for role in ("target", "draft"):
        for module in ("modeling_evil", "tokenization_evil", "configuration_evil"):
            (folder / role / f"{module}.py").write_text(CODE.format(marker=str(marker)))
        path = folder / role / "config.json"
        auto = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"}
        auto |= {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto}))
    assert outcome(folder, base) == SAME
    path = folder / "target" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto, "tokenizer_class": "Evil"}))
    assert outcome(folder, base) == SAME  # tokenizer.json is read by the library's own class
    assert load(folder).tokenizer(TEXT)["input_ids"] == base.tokenizer(TEXT)["input_ids"]
    assert not marker.exists()


def test_damaged_tokenizers(tmp_path: Path) -> None:
    folder = shutil.copytree(BYTES_PAIR, tmp_path / "pair")
    base, path = load(folder), folder / "target" / "tokenizer.json"
    good = path.read_text()
    contents = ["", "null", "[]", "{}", good[:-2], good + "}", "\ufeff" + good, '{"model": {"type": "BPE"}}']
    contents += [good.replace('"version"', '"x": ' + "[" * 60 + "]" * 60 + ', "version"', 1), "[" * 100000]
    contents += [json.dumps(json.loads(good) | {"model": value}) for value in (None, 3, {}, {"type": "Evil\n"})]
    for content in contents:
        path.write_text(content)
        assert outcome(folder, base) == REFUSED, content[:80]
