"""safetensors files that are cut or lie: about lengths, names, shapes, dtypes and places."""

import json
from pathlib import Path
from typing import Any

import pytest
from hostile_files import REFUSED, SAME, little_memory, outcome, parts, put
from layout_files import write_speculators

from torch_dflash import InputError, Pair, load_pair
from torch_dflash.cli import main

NAME, OTHER_NAME = "norm.weight", "hidden_norm.weight"  # two of the drafter's, 32 float32 each
BYTES = 128


def test_a_file_cut_anywhere(copy: Path, base: Pair) -> None:
    path = copy / "draft" / "model.safetensors"
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    cuts = {*range(12), *range(size - 3, size + 3), *range(12, len(content), len(content) // 40), len(content) - 1}
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        assert outcome(copy, base) == REFUSED, cut
    for longer in (content + b"\0", content + content):
        path.write_bytes(longer)
        assert outcome(copy, base) == REFUSED
    path.write_bytes(content)
    assert outcome(copy, base) == SAME


def test_a_header_that_lies_about_its_length(copy: Path, base: Pair) -> None:
    path = copy / "draft" / "model.safetensors"
    header, data = parts(path)
    size = len(json.dumps(header))
    lengths = [0, 1, 2, 8, size // 2, size - 1, size + 1, size + 8, size + BYTES, 10**8 - 1, 10**8, 2**31, 2**32]
    with little_memory():
        for length in [*lengths, 2**40, 2**63 - 1, 2**63, 2**64 - 1]:
            put(path, header, data, length)
            assert outcome(copy, base) == REFUSED, length


ENTRIES: dict[str, dict[str, Any]] = {
    "offsets swapped": {"data_offsets": [BYTES, 0]},
    "offsets of another tensor": {"data_offsets": None},
    "offsets negative": {"data_offsets": [-BYTES, 0]},
    "offsets beyond the end": {"data_offsets": [2**40, 2**40 + BYTES]},
    "offsets huge": {"data_offsets": [0, 2**63]},
    "offsets beyond 64 bits": {"data_offsets": [2**64, 2**64 + BYTES]},
    "offsets empty": {"data_offsets": []},
    "offsets of nothing": {"data_offsets": [0, 0]},
    "offsets of one": {"data_offsets": [0]},
    "offsets of three": {"data_offsets": [0, BYTES, BYTES]},
    "offsets fractional": {"data_offsets": [0.5, BYTES + 0.5]},
    "offsets text": {"data_offsets": ["0", str(BYTES)]},
    "offsets true": {"data_offsets": [False, True]},
    "offsets nested": {"data_offsets": [[0], [BYTES]]},
    "offsets object": {"data_offsets": {"begin": 0, "end": BYTES}},
    "shape huge": {"shape": [2**40]},
    "shape of 2**63": {"shape": [2**63]},
    "shape beyond 64 bits": {"shape": [2**64 + 32]},
    "shape whose product overflows to 32": {"shape": [2**32, 2**32, 32]},
    "shape whose product overflows to 0": {"shape": [2**32, 2**32]},
    "shape with zero": {"shape": [0]},
    "shape negative": {"shape": [-32]},
    "shape negative twice": {"shape": [-4, -8]},
    "shape fractional": {"shape": [32.0]},
    "shape text": {"shape": ["32"]},
    "shape null": {"shape": None},
    "shape a number": {"shape": 32},
    "shape nested": {"shape": [[32]]},
    "shape in two dimensions": {"shape": [4, 8]},
    "shape a scalar": {"shape": []},
    "shape too short": {"shape": [31]},
    "shape of a thousand dimensions": {"shape": [1] * 999 + [32]},
    "dtype F64": {"dtype": "F64"},
    "dtype F64, right length": {"dtype": "F64", "shape": [16]},
    "dtype BF16, right length": {"dtype": "BF16", "shape": [64]},
    "dtype I32": {"dtype": "I32"},
    "dtype F8": {"dtype": "F8_E4M3", "shape": [128]},
    "dtype F4": {"dtype": "F4", "shape": [256]},
    "dtype C64": {"dtype": "C64", "shape": [16]},
    "dtype BOOL": {"dtype": "BOOL", "shape": [128]},
    "dtype in small letters": {"dtype": "f32"},
    "dtype empty": {"dtype": ""},
    "dtype null": {"dtype": None},
    "dtype a number": {"dtype": 7},
    "dtype with a line break": {"dtype": "F32\n"},
    "dtype a pickle": {"dtype": "torch.float32"},
    "one more field": {"more": 1},
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_that_lies(entry: dict[str, Any], copy: Path, base: Pair) -> None:
    path = copy / "draft" / "model.safetensors"
    header, data = parts(path)
    change = {"data_offsets": header[OTHER_NAME]["data_offsets"]} if entry == {"data_offsets": None} else entry
    put(path, header | {NAME: header[NAME] | change}, data)
    with little_memory():
        assert outcome(copy, base) == (SAME if entry == {"more": 1} else REFUSED)
    for field in entry:
        put(path, header | {NAME: {k: v for k, v in header[NAME].items() if k != field}}, data)
        assert outcome(copy, base) == (SAME if entry == {"more": 1} else REFUSED)


def test_headers(copy: Path, base: Pair) -> None:
    path = copy / "draft" / "model.safetensors"
    header, data = parts(path)
    text, entry = json.dumps(header).encode(), json.dumps(header[NAME]).encode()
    again = text[:-1] + b', "%s": ' + entry + b"}"
    headers: dict[str, Any] = {
        "empty": b"",
        "an empty object": b"{}",
        "a list": b"[]",
        "null": b"null",
        "cut": text[:-1],
        "twice": text + text,
        "a name twice": again % NAME.encode(),
        "a name twice, escaped": again % b"\\u006eorm.weight",
        "a name with and without model.": again % b"model.norm.weight",
        "an unknown name": again % b"unknown",
        "a name that is not ASCII": again % "gewicht_ü_重み".encode(),
        "a name of control codes": again % b"a\\nb\\u001b[2J\\u2028",
        "half a surrogate pair": again % b"\\ud800",
        "no UTF-8": again % b"\xff",
        "a name of nothing": again % b"",
        "a long name": again % (b"x" * 100000),
        "a deep entry": text[:-1] + b', "x": ' + b"[" * 9999 + b"]" * 9999 + b"}",
        "metadata no object": header | {"__metadata__": [1]},
        "metadata no texts": header | {"__metadata__": {"format": 1}},
        "metadata nested": header | {"__metadata__": {"format": {"a": "b"}}},
        "a tensor left out": {name: value for name, value in header.items() if name != NAME},
        "an entry null": header | {NAME: None},
        "an entry a list": header | {NAME: [1, 2]},
        "byte order mark": b"\xef\xbb\xbf" + text,
        "UTF-16": text.decode().encode("utf-16"),
    }
    for kind, content in headers.items():
        put(path, content, data)
        assert outcome(copy, base) == REFUSED, kind
    harmless = {"blanks behind": text + b" " * 64, "metadata": header | {"__metadata__": {"a\nb": "\x1b[2J"}}}
    for kind, content in harmless.items():
        put(path, content, data)
        assert outcome(copy, base) == SAME, kind


def test_the_command_prints_one_line(pair: Path, copy: Path, capsys: pytest.CaptureFixture) -> None:
    path = copy / "draft" / "model.safetensors"
    header, data = parts(path)
    put(path, header | {NAME: header[NAME] | {"shape": [2**40]}}, data)
    assert main(["generate", "--target", str(pair / "target"), "--draft", str(copy / "draft"), "--json", "a text"]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("load target")]
    assert out == "" and len(lines) == 1 and lines[0].startswith(f"torch-dflash: {path}: damaged or unreadable")


def test_a_table_of_ids_costs_no_more_than_the_file(pair: Path, tmp_path: Path) -> None:
    folder = write_speculators(pair, tmp_path, rows=[1, 2, 3])
    header, data = parts(folder / "model.safetensors")
    put(folder / "model.safetensors", header | {"d2t": header["d2t"] | {"shape": [2**40]}}, data)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 12}))
    with little_memory(), pytest.raises(InputError, match="damaged"):
        load_pair(pair / "target", folder)
