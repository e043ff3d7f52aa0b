"""Weights off the disk: right values in memory of our own; one line for each kind of broken checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from torch_dflash.errors import InputError
from torch_dflash.weights import load_weights

HIDDEN, INNER, VOCAB, TAPS = 8, 12, 10, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=True)
        self.k_norm = Norm(4)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.input_layernorm = Norm(HIDDEN)


class Target(nn.Module):
    """The parameter names of a target, with fewer of them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = Norm(HIDDEN)
        if not tied:
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(TAPS * HIDDEN, HIDDEN, bias=False)
        self.hidden_norm = Norm(HIDDEN)


def meta(kind: type[nn.Module] = Target, **options: bool) -> nn.Module:
    with torch.device("meta"):
        module = kind(**options)
    if kind is Target:
        module.inv_freq = torch.arange(4.0)
    return module


def checkpoint(kind: type[nn.Module] = Target, dtype: torch.dtype = torch.float32, **options: bool) -> dict:
    """Tensors under checkpoint names: all but lm_head and the drafter's start with "model."."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in meta(kind, **options).state_dict().items():
        full = name if kind is Drafter or name.startswith("lm_head") else f"model.{name}"
        tensors[full] = torch.randn(tensor.shape, generator=generator).to(dtype)
    return tensors


def single(folder: Path, tensors: dict) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def sharded(folder: Path, tensors: dict) -> Path:
    """Two shards and their index."""
    names, weight_map = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    write_index(folder, weight_map)
    return folder


def index_path(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def write_index(folder: Path, weight_map: object) -> None:
    index_path(folder).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(folder: Path) -> dict:
    return json.loads(index_path(folder).read_text())["weight_map"]


def load(folder: Path, module: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> dict:
    module = meta() if module is None else module
    load_weights(module, folder, dtype)
    assert not any(p.requires_grad or p.is_meta for p in module.parameters())
    return module.state_dict()


def refused(folder: Path, *parts: str, module: nn.Module | None = None) -> None:
    with pytest.raises(InputError) as error:
        load(folder, module)
    message = str(error.value)
    assert "\n" not in message
    for part in (str(folder), *parts):
        assert part in message


def same(state: dict, tensors: dict, dtype: torch.dtype) -> None:
    assert {name.removeprefix("model.") for name in tensors} == set(state)
    for name, tensor in tensors.items():
        loaded = state[name.removeprefix("model.")]
        assert loaded.dtype == dtype
        torch.testing.assert_close(loaded, tensor.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("layout", [single, sharded])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_values_and_dtypes(tmp_path: Path, layout, stored: torch.dtype, wanted: torch.dtype) -> None:
    tensors = checkpoint(dtype=stored)
    same(load(layout(tmp_path, tensors), dtype=wanted), tensors, wanted)


def test_names_without_the_prefix_and_two_loads(tmp_path: Path) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoint().items()}
    folder = single(tmp_path, tensors)
    same(load(folder), tensors, torch.float32)
    same(load(folder), tensors, torch.float32)


def test_memory_is_our_own(tmp_path: Path) -> None:
    """Contiguous, aligned for JAX, and independent of the file, which is overwritten in place here."""
    tensors = checkpoint()
    folder = single(tmp_path, tensors)
    module = meta()
    state = load(folder, module)
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\xff" * size)
    same(state, tensors, torch.float32)
    assert all(t.data_ptr() % 64 == 0 and t.is_contiguous() and t.storage_offset() == 0 for t in state.values())
    assert len({t.untyped_storage().data_ptr() for t in state.values()}) == len(state)
    assert torch.equal(module.inv_freq, torch.arange(4.0))


def test_shards_may_be_links(tmp_path: Path) -> None:
    """The hub's cache keeps the files elsewhere and links to them."""
    store, folder = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    folder.mkdir()
    tensors = checkpoint()
    for path in list(sharded(store, tensors).iterdir()):
        (folder / path.name).symlink_to(path)
    same(load(folder), tensors, torch.float32)


def test_shipped_pair_reads_as_safetensors_does() -> None:
    folder = Path(__file__).parents[1] / "torch_dflash" / "data" / "bytes-pair" / "draft"
    tensors = load_file(folder / "model.safetensors")
    module = nn.Module()
    for name, tensor in tensors.items():
        _add_parameter(module, name.split("."), tensor.shape)
    load_weights(module, folder, torch.float32)
    same(module.state_dict(), tensors, torch.float32)


def _add_parameter(module: nn.Module, path: list[str], shape: torch.Size) -> None:
    for part in path[:-1]:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(path[-1], nn.Parameter(torch.empty(shape, device="meta")))


def test_tied_head_is_ignored_only_if_equal(tmp_path: Path) -> None:
    tensors = checkpoint(tied=True)
    embedding = tensors["model.embed_tokens.weight"]
    folder = single(tmp_path, {**tensors, "lm_head.weight": embedding.clone()})
    same(load(folder, meta(tied=True)), tensors, torch.float32)
    single(tmp_path, {**tensors, "lm_head.weight": embedding + 1})
    refused(folder, "lm_head.weight", "tie_word_embeddings", module=meta(tied=True))
    single(tmp_path, {**tensors, "lm_head.weight": embedding.bfloat16()})
    refused(folder, "lm_head.weight", "tie_word_embeddings", module=meta(tied=True))


def test_rotary_buffers_of_old_exports_are_ignored(tmp_path: Path) -> None:
    tensors = checkpoint()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    same(load(single(tmp_path, {**tensors, **extra})), tensors, torch.float32)


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    refused(single(tmp_path, tensors), "layers.1.self_attn.q_proj.bias is missing")
    tensors = checkpoint()
    del tensors["lm_head.weight"]
    refused(single(tmp_path, tensors), "lm_head.weight", "tie_word_embeddings")


def test_unexpected_tensor(tmp_path: Path) -> None:
    tensors = {**checkpoint(), "model.layers.0.self_attn.q_norm.weight": torch.ones(4)}
    refused(single(tmp_path, tensors), "model.layers.0.self_attn.q_norm.weight", "model.safetensors")
    tensors = {**checkpoint(Drafter), "lm_head.weight": torch.ones(2)}
    refused(single(tmp_path, tensors), "lm_head.weight", module=meta(Drafter))


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = {**checkpoint(), "model.norm.weight": torch.ones(HIDDEN + 1)}
    refused(single(tmp_path, tensors), "model.norm.weight", "[9]", "[8]", "model.safetensors")


def test_fc_width_names_taps_and_hidden(tmp_path: Path) -> None:
    tensors = {**checkpoint(Drafter), "fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}
    refused(single(tmp_path, tensors), "fc.weight", "[8, 16]", "[8, 24]", "3 taps * 8", module=meta(Drafter))


def test_quantised_dtype(tmp_path: Path) -> None:
    tensors = {**checkpoint(), "model.norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}
    refused(single(tmp_path, tensors), "model.norm.weight", "I8")


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    tensors = {**checkpoint(), "norm.weight": torch.ones(HIDDEN)}
    refused(single(tmp_path, tensors), "norm.weight", "model.norm.weight", "also")


@pytest.mark.parametrize("keep", [0, 5, 40, -8])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = single(tmp_path, checkpoint()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, "model.safetensors", "damaged")


def test_garbled_header(tmp_path: Path) -> None:
    path = single(tmp_path, checkpoint()) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff\xfe\n\n"
    path.write_bytes(data)
    refused(tmp_path, "model.safetensors", "damaged")


def test_missing_shard(tmp_path: Path) -> None:
    (sharded(tmp_path, checkpoint()) / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00002.safetensors", "missing shard")


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "other.safetensors", "model.safetensors"])
def test_stray_shard(tmp_path: Path, name: str) -> None:
    save_file({"x": torch.ones(1)}, sharded(tmp_path, checkpoint()) / name)
    refused(tmp_path, name, "stray")


def test_stray_shard_beside_a_single_file(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, single(tmp_path, checkpoint()) / "model-00001-of-00002.safetensors")
    refused(tmp_path, "model-00001-of-00002.safetensors", "stray")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/tmp/model.safetensors", "a/b.safetensors", "x.bin", 3])
def test_shard_must_stay_in_the_folder(tmp_path: Path, shard: object) -> None:
    weight_map = read_index(sharded(tmp_path, checkpoint()))
    write_index(tmp_path, {**weight_map, "model.norm.weight": shard})
    refused(tmp_path, "model.norm.weight", str(shard))


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors, name = checkpoint(), "model.norm.weight"
    weight_map = read_index(sharded(tmp_path, tensors))
    other = ({*weight_map.values()} - {weight_map[name]}).pop()
    part = {key: tensors[key] for key, shard in weight_map.items() if shard == other}
    save_file({**part, name: tensors[name]}, tmp_path / other)
    refused(tmp_path, name, other, weight_map[name], "also")


def test_index_that_disagrees_with_the_shards(tmp_path: Path) -> None:
    weight_map = read_index(sharded(tmp_path, checkpoint()))
    name = "model.norm.weight"
    swapped = ({*weight_map.values()} - {weight_map[name]}).pop()
    write_index(tmp_path, {**weight_map, name: swapped})
    refused(tmp_path, name, swapped, weight_map[name])
    write_index(tmp_path, {key: value for key, value in weight_map.items() if key != name})
    refused(tmp_path, name, "no file")
    write_index(tmp_path, {**weight_map, "model.extra.weight": swapped})
    refused(tmp_path, "model.extra.weight", "no file")


@pytest.mark.parametrize("weight_map", [None, {}, ["a"]])
def test_bad_index(tmp_path: Path, weight_map: object) -> None:
    write_index(sharded(tmp_path, checkpoint()), weight_map)
    refused(tmp_path, "index.json", "weight_map")
    index_path(tmp_path).write_text("{")
    refused(tmp_path, "index.json", "JSON")


def test_no_safetensors(tmp_path: Path) -> None:
    refused(tmp_path, "no model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    refused(tmp_path, ".bin", "convert")
    sharded(tmp_path, checkpoint())
    index_path(tmp_path).unlink()
    (tmp_path / "pytorch_model.bin").unlink()
    refused(tmp_path, "index.json is missing")
