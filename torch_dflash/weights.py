"""safetensors files -> the parameters of a module. Bytes are read straight into tensors that torch allocated.

Nothing is memory-mapped: these tensors later cross to JAX without a copy, which needs aligned memory that they own,
and a mapping would count as a second copy of the model.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from torch_dflash.config import ZLAB, Layout
from torch_dflash.config_fields import once, read_json
from torch_dflash.errors import InputError

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_INTEGERS = {"I32": torch.int32, "I64": torch.int64}  # of id tables
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_AGAIN = "download the checkpoint again"
_COMPARE_BYTES = 1 << 24


@dataclass(frozen=True)
class _Source:
    """One tensor in a file: its bytes are [begin, end) of `path`. `dtype` is safetensors' name."""

    tensor: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def load_weights(module: torch.nn.Module, folder: Path, dtype: torch.dtype, layout: Layout = ZLAB) -> None:
    """Fills `module` (on the meta device) from the safetensors of `folder`, gradients off.

    Weights are cast to `dtype`, id tables to int32. Module names are the checkpoint's without a leading "model.",
    renamed as `layout` says. Every result is fresh, contiguous and owned by torch; beside them at most one source
    tensor is in memory, and nothing is allocated before all names, shapes and dtypes have been checked. Raises
    InputError naming tensor and file.
    """
    wanted = module.state_dict()
    sources = _sources(folder, layout)
    _check_names(wanted, sources, folder)
    for name, tensor in wanted.items():
        _check_tensor(name, tensor, sources[name])
    state = {name: _cast(sources[name], tensor.dtype, dtype) for name, tensor in wanted.items()}
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False)


def stored_dtypes(folder: Path, layout: Layout) -> tuple[str, ...]:
    """safetensors' names of the dtypes in which the tensors of `folder` are stored."""
    return tuple(sorted({source.dtype for source in _sources(folder, layout).values()}))


def tensor_names(folder: Path, layout: Layout) -> set[str]:
    """The module names of all tensors in the safetensors of `folder`. Raises InputError."""
    return set(_sources(folder, layout))


def _sources(folder: Path, layout: Layout) -> dict[str, _Source]:
    """Every tensor of the checkpoint by module name."""
    index, single = folder / _INDEX, folder / _SINGLE
    sources: dict[str, _Source] = {}
    for source in _from_shards(folder, _weight_map(index)) if index.is_file() else _from_single(folder, single):
        _add(sources, source, layout)
    return sources


def _from_single(folder: Path, single: Path) -> Iterator[_Source]:
    if not single.is_file():
        raise InputError(_no_weights(folder))
    _refuse_stray(folder, "model*.safetensors", {_SINGLE}, f"{_SINGLE} is the whole checkpoint")
    return _scan(single)


def _no_weights(folder: Path) -> str:
    if sorted(folder.glob("*.bin")):
        return f"{folder}: holds only pytorch .bin weights, which are never read; convert them to {_SINGLE}"
    if sorted(folder.glob("model-*.safetensors")):
        return f"{folder}: {_INDEX} is missing beside the shards; {_AGAIN}"
    return f"{folder}: has no {_SINGLE} and no {_INDEX}; give the folder of a model"


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: weight_map must map tensors to files; {_AGAIN}")
    for tensor, shard in weight_map.items():
        # A plain name cannot leave the folder. Links stay allowed: the hub's cache is made of them.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise InputError(f"{index}: {tensor} is in {shard!r}; it must be a .safetensors file in this folder")
    return weight_map


def _from_shards(folder: Path, weight_map: dict[str, str]) -> Iterator[_Source]:
    shards = sorted(set(weight_map.values()))
    _refuse_stray(folder, "*.safetensors", set(shards), f"{_INDEX} does not name it")
    missing = [shard for shard in shards if not _is_file(folder / shard)]
    if missing:
        raise InputError(f"{folder / missing[0]}: missing shard, named by {_INDEX}; {_AGAIN}")
    found: dict[str, str] = {}
    for shard in shards:
        for source in _scan(folder / shard):
            yield source
            found[source.tensor] = shard
    for tensor in sorted(weight_map.keys() | found.keys()):
        if weight_map.get(tensor) != found.get(tensor):
            said, held = weight_map.get(tensor, "no file"), found.get(tensor, "no file")
            raise InputError(f"{folder / _INDEX}: puts {tensor} in {said}, but {held} holds it; {_AGAIN}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than the system allows
        return False


def _refuse_stray(folder: Path, pattern: str, used: set[str], reason: str) -> None:
    for path in sorted(folder.glob(pattern)):
        if path.name not in used:
            raise InputError(f"{path}: stray weights, {reason}; remove it or {_AGAIN}")


def _scan(path: Path) -> Iterator[_Source]:
    """The tensors in one file. safetensors itself checks the header, the offsets and the file's length."""
    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size), object_pairs_hook=once)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged or unreadable ({_one_line(error)}); {_AGAIN}") from None
    for tensor, entry in header.items():
        if tensor != "__metadata__":
            begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
            yield _Source(tensor, path, entry["dtype"], tuple(entry["shape"]), begin, end)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _add(sources: dict[str, _Source], source: _Source, layout: Layout) -> None:
    name = source.tensor.removeprefix("model.")
    name = dict(layout.renames).get(name, name)
    if name in layout.unused or name.endswith("rotary_emb.inv_freq"):
        return  # old exports carry the frequencies; they are computed from the config
    if name in sources:
        first = sources[name]
        raise InputError(
            f"{source.path}: tensor {source.tensor} is also in {first.path.name} as {first.tensor}; {_AGAIN}"
        )
    sources[name] = source


def _check_names(wanted: Mapping[str, torch.Tensor], sources: dict[str, _Source], folder: Path) -> None:
    missing = sorted(wanted.keys() - sources.keys())
    if missing:
        hint = " or set tie_word_embeddings in config.json" if missing == ["lm_head.weight"] else ""
        raise InputError(f"{folder}: tensor {missing[0]} is missing{_more(missing)}; {_AGAIN}{hint}")
    unused = sources.keys() - wanted.keys()
    embedding = sources.get("embed_tokens.weight")
    if "lm_head.weight" in unused and embedding is not None:
        _check_tied(sources["lm_head.weight"], embedding)
        unused -= {"lm_head.weight"}
    if unused:
        source = sources[min(unused)]
        reason = f"unexpected tensor {source.tensor}{_more(unused)}; config.json describes a model without it"
        raise InputError(f"{source.path}: {reason}")


def _more(names: set[str] | list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_tied(head: _Source, embedding: _Source) -> None:
    """A tied checkpoint may store its head too, but only as the same bytes."""
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if not same or any(a != b for a, b in zip(_chunks(head), _chunks(embedding), strict=True)):
        reason = f"tensor {head.tensor} differs from {embedding.tensor}, though config.json ties them"
        raise InputError(f"{head.path}: {reason}; set tie_word_embeddings to false")


def _chunks(source: _Source) -> Iterator[bytes]:
    with source.path.open("rb") as file:
        file.seek(source.begin)
        for begin in range(source.begin, source.end, _COMPARE_BYTES):
            yield file.read(min(_COMPARE_BYTES, source.end - begin))


def _check_tensor(name: str, tensor: torch.Tensor, source: _Source) -> None:
    where, shape = f"{source.path}: tensor {source.tensor}", tuple(tensor.shape)
    dtypes = _DTYPES if tensor.dtype.is_floating_point else _INTEGERS
    if source.dtype not in dtypes:
        known = ", ".join(dtypes)
        raise InputError(f"{where} has dtype {source.dtype}; only {known} are read, use the unquantised checkpoint")
    if source.shape == shape:
        return
    reason = f"has shape {list(source.shape)}, but config.json asks for {list(shape)}"
    if name == "fc.weight":
        hidden, width = shape
        reason += f" = [hidden, taps * hidden] with {width // hidden} taps * {hidden}; correct target_layer_ids"
        raise InputError(f"{where} {reason} or use the drafter for this target")
    raise InputError(f"{where} {reason}; the weights belong to another config")


def _cast(source: _Source, module_dtype: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`, or an id table as int32."""
    tensor = _read(source)
    if module_dtype.is_floating_point:
        return tensor.to(dtype)
    table = tensor.to(module_dtype)
    if not torch.equal(table.to(tensor.dtype), tensor):
        raise InputError(f"{source.path}: tensor {source.tensor} has values beyond 32 bits; {_AGAIN}")
    return table


def _read(source: _Source) -> torch.Tensor:
    """The tensor as stored, in memory that torch allocated (64-byte aligned)."""
    tensor = torch.empty(source.shape, dtype=(_DTYPES | _INTEGERS)[source.dtype])
    if math.prod(source.shape) == 0:
        return tensor
    buffer = tensor.view(-1).view(torch.uint8).numpy().data
    with source.path.open("rb", buffering=0) as file:
        file.seek(source.begin)
        while buffer:
            count = file.readinto(buffer)  # one call reads at most 2 GiB
            if not count:
                raise InputError(f"{source.path}: ends inside tensor {source.tensor}; {_AGAIN}")
            buffer = buffer[count:]
    return tensor
