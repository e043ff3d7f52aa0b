"""Every field of every config times wrong types, ranges and nestings; and files that are no JSON at all."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_files import OTHER, REFUSED, SAME, little_memory, load, outcome
from layout_files import LAYER_FIELDS, muse_config, speculators_config, write_muse, write_pair, write_speculators

from torch_dflash.cli import main

NESTED: list[Any] = []
for _ in range(40):
    NESTED = [NESTED]
VALUES = {
    "null": None,
    "text": "a\nb\x1b[31m\u2028",
    "surrogate": "\ud800",
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "2**31": 2**31,
    "2**24": 2**24,
    "10**40": 10**40,
    "nan": math.nan,
    "inf": math.inf,
    "true": True,
    "false": False,
    "[]": [],
    "{}": {},
    "nested": NESTED,
    "['a']": ["a"],
}
ANY = " ".join(VALUES)
POSITIVE = "1.5 2**31 2**24"
TARGET = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 3,
    "use_sliding_window": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "num_experts": None,
    "transformers_version": "5.24.0",
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": True}
YARN |= {"beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0, "mscale": None}
DRAFTER = {
    "attention_bias": False,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 16,
    "is_causal": False,
    "rope_scaling": YARN,
}
# field -> the values under which the pair is the same, and those under which it is another, valid one. All others
# must be refused.
COMMON = {
    "model_type": ("null", ""),
    "attention_bias": ("null false", ""),
    "mlp_bias": ("null false", ""),
    "hidden_act": ("null", ""),
    "max_position_embeddings": ("", "2**24"),
    "rms_norm_eps": ("", POSITIVE),
}
EXPECTED: dict[str, dict[str, tuple[str, str]]] = {
    "target": COMMON
    | {
        "rope_theta": ("null", ""),
        "tie_word_embeddings": ("null false", ""),
        "eos_token_id": ("0", "null 2**24 []"),
        "layer_types": ("null []", ""),
        "use_sliding_window": ("null false", ""),
        "rope_parameters": ("null {}", ""),
        "rope_parameters.rope_theta": ("null", ""),
        "rope_parameters.rope_type": ("null", ""),
        "rope_scaling": ("null {}", ""),
        "partial_rotary_factor": ("null true", ""),
        "quantization_config": ("null", ""),
        "num_experts": ("null 0 false", ""),
        "transformers_version": (ANY, ""),
    },
    "generation": {"eos_token_id": ("null 0 []", "2**24"), "temperature": (ANY, "")},
    "draft": COMMON
    | {
        "rope_theta": ("", POSITIVE),
        "tie_word_embeddings": (ANY, ""),
        "eos_token_id": (ANY, ""),
        "dflash_config.target_layer_ids": ("null", ""),
        "dflash_config.mask_token_id": ("", "0"),
        "layer_types": ("", ""),
        "use_sliding_window": ("true", "null false"),
        "sliding_window": ("", "null 2**24"),
        "is_causal": ("false", "null true"),
        "rope_scaling": ("", "null {}"),
        "rope_scaling.factor": ("", POSITIVE),
        "rope_scaling.original_max_position_embeddings": ("", "2**24"),
        "rope_scaling.truncate": ("null true", "false"),
        "rope_scaling.beta_fast": ("null", POSITIVE),
        "rope_scaling.beta_slow": ("null", "1.5"),
        "rope_scaling.attention_factor": ("", f"null {POSITIVE}"),
        "rope_scaling.mscale": (f"null 0 {POSITIVE}", ""),  # attention_factor is explicit
    },
}


def fields(config: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in config.items():
        yield above + name
        if isinstance(value, dict):
            yield from fields(value, f"{above}{name}.")


def changed(config: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    name, _, rest = field.partition(".")
    return config | {name: changed(config[name], rest, value) if rest else value}


def wrong(path: Path, config: dict[str, Any], expected: dict[str, tuple[str, str]], folder: Path) -> list[str]:
    """Puts every value into every field; returns what came out differently."""
    path.write_text(json.dumps(config))
    base, found = load(folder), []
    with little_memory():
        for field in fields(config):
            same, other = expected.get(field, ("", ""))
            for kind, value in VALUES.items():
                path.write_text(json.dumps(changed(config, field, value)))
                wanted = SAME if kind in same.split() else OTHER if kind in other.split() else REFUSED
                got = outcome(folder, base, f"drafter {field.rpartition('.')[2]}")
                found += [f"{field} = {kind}: {got}"] if got != wanted else []
    path.write_text(json.dumps(config))
    return found


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_pair(tmp_path)


@pytest.mark.parametrize("role", ["target", "generation", "draft"])
def test_every_field_of_zlabs_layout(role: str, pair: Path) -> None:
    if role == "generation":
        path, config = pair / "target" / "generation_config.json", {"eos_token_id": 0, "temperature": 0.7}
    else:
        path = pair / role / "config.json"
        config = json.loads(path.read_text()) | (TARGET if role == "target" else DRAFTER)
    assert wrong(path, config, EXPECTED[role], pair) == []
    assert set(EXPECTED[role]) - set(fields(config)) <= {"mlp_bias", "hidden_act"}


def test_every_field_of_the_muse_layout(pair: Path) -> None:
    write_muse(pair, pair / "draft")
    config = {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {"rope_theta": 10000.0}}
    expected = COMMON | {
        "sliding_window": ("", "2**24"),
        "mask_token_id": ("", "0"),
        "rope_parameters.rope_theta": ("", POSITIVE),
    }
    assert wrong(pair / "draft" / "config.json", muse_config(**config), expected, pair) == []


def test_every_field_of_the_speculators_layout(pair: Path) -> None:
    write_speculators(pair, pair / "draft")
    config = speculators_config()
    config["transformer_layer_config"] = {k: config["transformer_layer_config"][k] for k in LAYER_FIELDS}
    inner = {f"transformer_layer_config.{name}": kinds for name, kinds in COMMON.items()}
    expected = inner | {
        "transformer_layer_config.rope_theta": ("", POSITIVE),
        "architectures": ("null", ""),
        "speculators_version": (ANY, ""),
        "mask_token_id": ("", "0"),
        "sample_from_anchor": ("null false", ""),
        "sliding_window_non_causal": ("null true false", ""),
        "target_hidden_size": ("null", ""),
        "tie_word_embeddings": (ANY, ""),
    }
    assert wrong(pair / "draft" / "config.json", config, expected, pair) == []


def bad_files(good: str) -> dict[str, bytes]:
    """Files in place of a config. `good` is one."""
    return {
        "empty": b"",
        "blank": b" \n",
        "null": b"null",
        "list": b"[]",
        "number": b"1",
        "cut": good[:-1].encode(),
        "byte order mark": b"\xef\xbb\xbf" + good.encode(),
        "UTF-16": good.encode("utf-16"),
        "no UTF-8": good[:-1].encode() + b', "a": "\xff"}',
        "zeros": b"\x00" * 64,
        "more": good.encode() + b"{}",
        "comment": good.encode() + b"// end",
        "twice": good[:-1].encode() + b', "x": 1, "x": 1}',
        "twice inside": good[:-1].encode() + b', "x": [{"a": 1, "a": 1}]}',
        "twice with a line break": good[:-1].encode() + b', "a\\nb": 1, "a\\nb": 1}',
        "deep list": good[:-1].encode() + b', "x": ' + b"[" * 100000 + b"]" * 100000 + b"}",
        "deep object": good[:-1].encode() + b', "x": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
        "51 levels": good[:-1].encode() + b', "x": ' + b"[" * 51 + b"]" * 51 + b"}",
        "a number of 5000 digits": good[:-1].encode() + b', "x": ' + b"9" * 5000 + b"}",
        "pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.",
    }


@pytest.mark.parametrize("name", ["target/config.json", "target/generation_config.json", "draft/config.json"])
def test_files_that_are_no_config(name: str, pair: Path) -> None:
    path, base = pair / name, load(pair)
    good = path.read_text() if path.exists() else '{"eos_token_id": 0}'
    for kind, content in bad_files(good).items():
        path.write_bytes(content)
        assert outcome(pair, base) == REFUSED, kind
    path.write_text(good.replace("{", '{"more": {"unknown": [1]}, ', 1))
    assert outcome(pair, base) == SAME
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole, no memory and no disk
    with little_memory():
        assert outcome(pair, base) == REFUSED
    path.unlink()
    for place in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        place()
        assert outcome(pair, base) == REFUSED
        path.rmdir() if path.is_dir() else path.unlink()
    for place in (lambda: path.symlink_to(path), lambda: path.symlink_to(pair / "nowhere")):  # as if it were not there
        place()
        assert outcome(pair, base) == (SAME if "generation" in name else REFUSED)
        path.unlink()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_command_prints_one_line(role: str, pair: Path, capsys: pytest.CaptureFixture) -> None:
    path = pair / role / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "a\nb\x1b[31m\u2028\udcff"}))
    assert main(["generate", "--target", str(pair / "target"), "--draft", str(pair / "draft"), "a text"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"torch-dflash: {path}: model_type is ") and err.count("\n") == 1
    assert err[:-1].isprintable() and err.isascii()
