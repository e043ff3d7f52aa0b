"""Text to token ids at the door, token ids to text on the way out."""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torch_dflash.config_fields import read_json
from torch_dflash.errors import InputError

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

_FILES = ("tokenizer.json", "vocab.json")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model folder, or None where there is none (then prompts are token ids).

    Never runs code from the folder and never asks the network. Raises InputError for a damaged one.
    """
    if not any((folder / name).is_file() for name in _FILES):
        return None
    for path in sorted(folder.glob("*token*.json")):
        read_json(path)
    try:
        # Clean-up would change decoded text (it strips spaces before punctuation): off for all models.
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, clean_up_tokenization_spaces=False
        )
    except Exception as error:  # the tokenizers library raises nothing narrower for a damaged file
        raise InputError(f"{folder}: the tokenizer cannot be loaded ({_one_line(error)}); download it again") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def as_chat(text: str, tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    """The text as a user's message where there is a chat template, else the text as it is."""
    if tokenizer is None or not tokenizer.chat_template:
        return text
    return [{"role": "user", "content": text}]


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, thinking: bool | None = None
) -> list[int]:
    """Token ids of a text (as it is), chat messages (through the chat template, once) or token ids (checked).

    A text gets the special tokens that its tokenizer adds (Llama's BOS); never two BOS. thinking: what a chat template
    that knows `enable_thinking` gets as such; None leaves that to the template. Raises InputError.
    """
    if isinstance(prompt, str):
        ids: list[Any] = _encode_text(prompt, _needed(tokenizer, "text"))
    elif not isinstance(prompt, Sequence):
        raise InputError(f"prompt is of type {type(prompt).__name__}; give a text, messages or a list of token ids")
    elif any(isinstance(item, Mapping) for item in prompt):
        ids = _encode_messages(prompt, _needed(tokenizer, "chat messages"), thinking)
    else:
        ids = [*prompt]
    if not ids:
        raise InputError(f"prompt is empty ({prompt!r}); give at least one token")
    return [_checked_id(i, value, vocab_size) for i, value in enumerate(ids)]


def _needed(tokenizer: PreTrainedTokenizerBase | None, kind: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise InputError(f"prompt is {kind}, but the target has no tokenizer files; give a list of token ids")
    return tokenizer


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not text:
        return []
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"prompt is not valid Unicode at character {error.start}; give UTF-8 text") from None
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not has_bos)["input_ids"]


def _encode_messages(messages: Any, tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> list[int]:
    for i, message in enumerate(messages):
        fields = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(field, str) for field in fields):
            raise InputError(f"prompt message {i} is {message!r}; each needs a text role and a text content")
    if not tokenizer.chat_template:
        raise InputError("prompt is chat messages, but the target's tokenizer has no chat_template; give a text")
    switch = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **switch)
    except (TemplateError, ValueError, TypeError) as error:
        raise InputError(f"prompt messages do not suit the chat_template ({_one_line(error)})") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote the special tokens


def _checked_id(position: int, value: Any, vocab_size: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"prompt id {value!r} at position {position} is not an integer; give token ids")
    token_id = int(value)
    if not 0 <= token_id < vocab_size:
        limits = f"outside the vocabulary 0..{vocab_size - 1}"
        raise InputError(f"prompt id {token_id} at position {position} is {limits}; use the target's own tokenizer")
    return token_id


def eos_ids(tokenizer: PreTrainedTokenizerBase | None, config_ids: Iterable[int]) -> tuple[int, ...]:
    """All ids that end the text: the configs' and the tokenizer's, sorted."""
    own = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(sorted({*config_ids, *own}))


class TextPieces:
    """Token ids in, pieces of text out as soon as they are final.

    All pieces joined equal `tokenizer.decode(ids, skip_special_tokens=True)`, or what of it comes before the first
    stop string. A letter never comes in parts, and what may be the beginning of a stop string is held back. The cost
    grows linearly with the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()) -> None:
        self._decoder = _ByteLevelPieces(tokenizer) if _is_byte_level(tokenizer) else _WindowPieces(tokenizer)
        self._stop_strings = stop_strings
        self._held = ""
        self.stopped = False  # a stop string has come, and the text is over

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these further ids settle; may be empty."""
        self._held += self._decoder.feed(ids)
        return self._release(self._beginning_of_stop())

    def finish(self) -> str:
        """The rest: what was held back because more ids might have completed it."""
        self._held += self._decoder.finish()
        return self._release(0)

    def _release(self, held: int) -> str:
        """All but the last `held` letters, or what comes before a stop string."""
        found = [at for stop in self._stop_strings if (at := self._held.find(stop)) >= 0]
        if self.stopped or found:
            text, self._held = self._held[: min(found, default=0)] if not self.stopped else "", ""
            self.stopped = True
            return text
        end = len(self._held) - held
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _beginning_of_stop(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        lengths = range(1, min(longest, len(self._held)) + 1)
        return max((n for n in lengths if any(s.startswith(self._held[-n:]) for s in self._stop_strings)), default=0)


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.is_fast) and isinstance(tokenizer.backend_tokenizer.decoder, ByteLevel)


def _letter_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_LETTER_BYTES = _letter_bytes()


class _Shown:
    """The tokens that have text: neither special nor beyond the tokenizer's last (a padded vocabulary)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._skipped = added | set(tokenizer.all_special_ids)

    def __call__(self, ids: Iterable[int]) -> list[tuple[int, str]]:
        kept = [i for i in ids if i not in self._skipped]
        tokens = self._tokenizer.convert_ids_to_tokens(kept)
        return [(i, token) for i, token in zip(kept, tokens, strict=True) if token is not None]


class _ByteLevelPieces:
    """Every token is a run of bytes, whatever its neighbours, and UTF-8 itself says where letters end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._shown = _Shown(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(_token_bytes(token) for _, token in self._shown(ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def _token_bytes(token: str) -> bytes:
    if all(letter in _LETTER_BYTES for letter in token):
        return bytes(_LETTER_BYTES[letter] for letter in token)
    return token.encode()  # an added token with, say, a space in it stands for itself


class _WindowPieces:
    """For other decoders (SentencePiece). A token's text depends on its neighbours, so a window is decoded: the newest
    ids whose text is out, and those behind them. A run of byte tokens is settled where it ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._shown = _Shown(tokenizer)
        self._settled: list[int] = []
        self._pending: list[int] = []

    def feed(self, ids: Iterable[int]) -> str:
        shown = self._shown(ids)
        self._pending += [i for i, _ in shown]
        if not shown or _BYTE_TOKEN.fullmatch(shown[-1][1]):
            return ""
        return self._settle()

    def finish(self) -> str:
        return self._settle()

    def _settle(self) -> str:
        before = self._text(self._settled)
        after = self._text(self._settled + self._pending)
        self._settled, self._pending = self._pending or self._settled, []
        return after[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
