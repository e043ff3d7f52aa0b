"""Prompts out of datasets as the hub has them. A folder stands for a repository: the same loader reads both."""

import json
import sys
from pathlib import Path

import pytest

from torch_dflash.bench.datasets import read_datasets
from torch_dflash.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what `datasets` imports


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two splits; a column of texts, one of turns, one of numbers."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "repository"
    folder.mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{split} {i}", "turns": [f"first {i}", "second"], "number": i} for i in range(5)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_columns_and_splits(repository: str) -> None:
    """Texts or first turns; the split is "test" unless another is named; no more than were asked for."""
    names = [f"hub:{repository}#question", f"hub:{repository}@train#turns"]
    asked, turns = read_datasets(names, None, 2)
    assert asked.prompts == ("test 0", "test 1") and turns.prompts == ("first 0", "first 1")
    assert asked.origin == names[0] and "/" not in asked.name


@pytest.mark.parametrize(
    ("rest", "line"),
    [
        ("", "must look like hub:OWNER/NAME"),
        ("#answer", "no column 'answer': use one of question, turns, number"),
        ("#number", "row 0 is 0, use a column of texts"),
        ("@train[:0]#question", "cannot be loaded"),
        ("@dev#question", "cannot be loaded"),
        (":other#question", "cannot be loaded"),
    ],
)
def test_what_is_not_there_is_one_line(rest: str, line: str, repository: str) -> None:
    with pytest.raises(InputError, match=line) as caught:
        read_datasets([f"hub:{repository}{rest}"], None, 2)
    assert "\n" not in str(caught.value)


def test_the_package_is_named_where_it_is_missing(repository: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'torch-dflash\[bench\]'"):
        read_datasets([f"hub:{repository}#question"], None, 2)
