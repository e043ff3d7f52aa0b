"""Prompts out of a dataset of the Hugging Face hub, by the package `datasets`."""

import re
from typing import Any

from torch_dflash.errors import InputError

FORM = "hub:OWNER/NAME[:CONFIG][@SPLIT]#COLUMN"
_NAME = re.compile(r"hub:(?P<repo>[^:@#]+)(:(?P<config>[^@#]+))?(@(?P<split>[^#]+))?#(?P<column>.+)")


def read_hub(name: str, limit: int) -> tuple[str, ...]:
    """The first `limit` prompts of `name`, which has the form FORM; the split is "test" unless it says otherwise.

    A column holds a text, or a list of turns whose first is taken. Example: hub:openai/gsm8k:main#question. Raises
    InputError.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise InputError(f"--dataset {name}: it must look like {FORM}, as hub:openai/gsm8k:main#question")
    rows, column = _rows(name, match["repo"], match["config"], match["split"] or "test"), match["column"]
    if column not in rows.column_names:
        raise InputError(f"--dataset {name} has no column {column!r}: use one of {', '.join(rows.column_names)}")
    return tuple(_prompt(name, number, value) for number, value in enumerate(rows[:limit][column]))


def _rows(name: str, repo: str, config: str | None, split: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise InputError(f"--dataset {name} needs a package: pip install 'torch-dflash[bench]'") from None
    try:
        return datasets.load_dataset(repo, config, split=split)
    except Exception as error:  # its errors are of many kinds: not there, gated, offline, other splits or configs
        reason = " ".join(str(error).split())
        raise InputError(f"--dataset {name} cannot be loaded ({reason}): check its name, config and split") from None


def _prompt(name: str, number: int, value: Any) -> str:
    text = value[0] if isinstance(value, list) and value else value
    if not isinstance(text, str) or not text:
        raise InputError(f"--dataset {name}: row {number} is {value!r}, use a column of texts or of lists of turns")
    return text
