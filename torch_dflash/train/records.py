"""What training reads and writes as JSON lines: prompts in, the target's own answers out."""

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch_dflash.errors import InputError

REPEATED_GRAM = 16
MAX_REPEATS = 3


@dataclass(frozen=True)
class Answer:
    """One prompt and what the target wrote behind it; ids only.

    index: which prompt, in the order of the prompt files. num_sampled: leading answer tokens that were drawn at
    temperature 1 only to vary the text: context for training, never a label.
    """

    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    num_sampled: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.answer_ids

    @property
    def first_anchor(self) -> int:
        """Position of the first token that may be an anchor."""
        return len(self.prompt_ids) + self.num_sampled

    @property
    def line(self) -> str:
        """Of the answers file."""
        return json.dumps(asdict(self)) + "\n"


def read_prompts(path: Path) -> list[str]:
    """The first turn of every line of a prompt file ({"turns": [text, ...]}). Raises InputError naming the line."""
    return [_first_turn(path, number, line) for number, line in enumerate(_lines(path), 1)]


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give a file of JSON lines") from None
    return content.rstrip("\n").split("\n")  # not splitlines: a text may hold U+2028


def _first_turn(path: Path, number: int, line: str) -> str:
    where = f"{path}, line {number}"
    try:
        content = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: is not JSON ({error})") from None
    turns = content.get("turns") if isinstance(content, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise InputError(f'{where}: needs {{"turns": [text, ...]}} with a first text that is not empty')
    return turns[0]


def mend(path: Path) -> None:
    """Drop a half-written last line, which a killed run leaves behind."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


def read_answers(path: Path) -> list[Answer]:
    """All whole lines of an answers file. Raises InputError naming a damaged one."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [_answer(path, number, line) for number, line in enumerate(whole, 1)]


def _answer(path: Path, number: int, line: str) -> Answer:
    try:
        fields = json.loads(line)
        prompt_ids, answer_ids = tuple(fields["prompt_ids"]), tuple(fields["answer_ids"])
        return Answer(int(fields["index"]), prompt_ids, answer_ids, int(fields.get("num_sampled", 0)))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}, line {number}: is not an answer ({error!r}); remove the line") from None


def append_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Add lines and flush them."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(answer.line for answer in answers)


def usable_length(ids: Sequence[int]) -> int:
    """How many leading ids are worth training on: a text is cut where one of its 16-grams comes the third time."""
    raw = array("q", ids).tobytes()  # slices of bytes are cheap keys
    size = len(raw) // max(len(ids), 1)
    seen: dict[bytes, int] = {}
    for begin in range(len(ids) - REPEATED_GRAM + 1):
        gram = raw[begin * size : (begin + REPEATED_GRAM) * size]
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] == MAX_REPEATS:
            return begin
    return len(ids)
