"""Prompts in, text out: refusals at the door, and streamed pieces that join to exactly the decoded text."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from torch_dflash.errors import InputError
from torch_dflash.hub import resolve_target
from torch_dflash.tokenizer import TextPieces, encode_prompt, eos_ids, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
)
LETTERS = ["a", " ", "é", "你", "🙂", "\ufffd", "\n"]


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerBase:
    """Id = byte value; 256 <|endoftext|> and 257 <|mask|> are special; 258..263 have no token."""
    tokenizer = load_tokenizer(resolve_target("bytes"))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def sentencepiece() -> PreTrainedTokenizerBase:
    """Llama 2's kind: ids 0-2 special, then 256 byte tokens, then pieces with their own leading space."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    pieces = ["▁", "a", "b", "é", "▁a", "▁▁", "ab", "▁ab"]
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + pieces:
        vocab[token] = len(vocab)
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b"), ("▁", "ab")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(strip)
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


def pieces_of(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], cut: random.Random, stops: Sequence[str] = ()
) -> list[str]:
    stream, pieces, start = TextPieces(tokenizer, stops), [], 0
    while start < len(ids):
        end = start + cut.randrange(1, 5)
        pieces.append(stream.feed(ids[start:end]))
        start = end
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_pieces_join_to_the_decoded_text(name: str, request: pytest.FixtureRequest) -> None:
    """Random ids: broken UTF-8, special tokens inside a letter, cuts anywhere."""
    tokenizer = request.getfixturevalue(name)
    rng = random.Random(0)
    for _ in range(600):
        ids = [_random_id(tokenizer, rng) for _ in range(rng.randrange(24))]
        assert "".join(pieces_of(tokenizer, ids, rng)) == tokenizer.decode(ids, skip_special_tokens=True)


def _random_id(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> int:
    """Any token, or one byte of a letter with several."""
    byte = rng.choice("é你🙂".encode())
    letter = tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") if len(tokenizer) > 258 else byte
    return rng.choice([rng.randrange(len(tokenizer)), letter])


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_letters_come_whole(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    rng = random.Random(1)
    for _ in range(100):
        text = "a" + "".join(rng.choices(LETTERS, k=12))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        stream = TextPieces(tokenizer)
        joined = ""
        for i in ids:
            joined += stream.feed([i])
            assert text.startswith(joined)
        assert joined + stream.finish() == text


def test_a_letter_is_out_with_its_last_byte(byte_level: PreTrainedTokenizerBase) -> None:
    stream = TextPieces(byte_level)
    assert [stream.feed([byte]) for byte in "x你y".encode()] == ["x", "", "", "你", "y"]
    assert stream.feed(list("🙂".encode())[:2]) == ""
    assert stream.feed([256, 257]) == ""
    assert stream.feed(list("🙂".encode())[2:]) == "🙂"
    assert stream.feed([0xE4]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_cost_is_linear(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts ids decoded, also where nothing is ever settled: a long run of bytes that form no letter."""
    tokenizer = request.getfixturevalue(name)
    decoded = 0
    for method in ("decode", "convert_ids_to_tokens"):
        original = getattr(tokenizer, method)

        def counted(ids, *args, original=original, **kwargs):
            nonlocal decoded
            decoded += len(ids)
            return original(ids, *args, **kwargs)

        monkeypatch.setattr(tokenizer, method, counted)
    stray = 0x80 if name == "byte_level" else 3 + 0x80
    for ids in ([stray] * 1000, list(range(97, 123)) * 40):
        decoded = 0
        stream = TextPieces(tokenizer)
        for i in ids:
            stream.feed([i])
        stream.finish()
        assert decoded <= 5 * len(ids)


def test_text_as_it_is(byte_level: PreTrainedTokenizerBase, sentencepiece: PreTrainedTokenizerBase) -> None:
    assert encode_prompt("hé\n", byte_level, 264) == list("hé\n".encode())
    ids = encode_prompt("ab", sentencepiece, 300)
    assert sentencepiece.convert_ids_to_tokens(ids) == ["<s>", "▁a", "b"]
    assert encode_prompt("<s>ab", sentencepiece, 300).count(1) == 1


def test_chat_template_is_applied_once(sentencepiece: PreTrainedTokenizerBase) -> None:
    ids = encode_prompt([{"role": "user", "content": "a"}], sentencepiece, 300)
    assert ids.count(1) == 1
    assert sentencepiece.decode(ids).count("[bot]") == 1
    assert "[user]a" in sentencepiece.decode(ids)


def test_token_ids_pass_through() -> None:
    ids = encode_prompt([0, 5, 263], None, 264)
    assert ids == [0, 5, 263]
    ids = encode_prompt([np.int64(5), np.int32(6)], None, 264)
    assert ids == [5, 6]
    assert all(type(i) is int for i in ids)


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("", ["prompt is empty"]),
        ([], ["prompt is empty"]),
        ([1, 264], ["264", "position 1", "0..263"]),
        ([-1], ["-1", "position 0"]),
        ([1, True], ["True", "position 1"]),
        ([2.0], ["2.0", "position 0"]),
        (["hi"], ["'hi'", "position 0"]),
        ([None], ["None"]),
        (5, ["int"]),
        (None, ["NoneType"]),
        ([{"role": "user", "content": "hi"}], ["chat_template"]),
        ([{"role": "user"}], ["message 0", "content"]),
        ([{"role": "user", "content": "x"}, 5], ["message 1", "5"]),
        ([{"role": "user", "content": [{"type": "image"}]}], ["message 0", "image"]),
    ],
)
def test_refused_prompts(byte_level: PreTrainedTokenizerBase, prompt: object, parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        encode_prompt(prompt, byte_level, 264)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    for part in ["prompt", *parts]:
        assert part in str(error.value)


def test_text_beyond_the_models_vocabulary(byte_level: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match=r"id 122 at position 1 .* 0\.\.99"):
        encode_prompt("az", byte_level, 100)


def test_template_that_refuses(sentencepiece: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match=r"chat_template \(no system\)"):
        encode_prompt([{"role": "system", "content": "a"}], sentencepiece, 300)


@pytest.mark.parametrize("prompt", ["hi", [{"role": "user", "content": "hi"}]])
def test_text_without_a_tokenizer(prompt: object) -> None:
    with pytest.raises(InputError, match="no tokenizer files; give a list of token ids"):
        encode_prompt(prompt, None, 264)  # type: ignore[arg-type]


def test_eos_ids_are_the_union(byte_level: PreTrainedTokenizerBase) -> None:
    assert eos_ids(byte_level, (7, 256)) == (7, 256)
    assert eos_ids(byte_level, ()) == (256,)
    assert eos_ids(None, (3, 1)) == (1, 3)


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read as JSON"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"model": {"type": "nothing"}}'])
def test_a_damaged_tokenizer_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match="tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_stop_string_is_found_however_its_letters_come(name: str, request: pytest.FixtureRequest) -> None:
    """Stop strings longer than what has come of them, that overlap, that begin and do not go on."""
    tokenizer, rng = request.getfixturevalue(name), random.Random(2)
    stopped = 0
    for _ in range(600):
        text = "".join(rng.choices("abé", k=rng.randrange(1, 16)))
        stops = ["".join(rng.choices("abé", k=rng.randrange(1, 7))) for _ in range(rng.randrange(1, 4))]
        ids = tokenizer("a" + text, add_special_tokens=False)["input_ids"][1:]
        ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
        known = text[: ends[0]] if ends else text
        expected = known[: min(known.find(stop) for stop in stops if stop in known)] if ends else text
        pieces = TextPieces(tokenizer, stops)
        joined, last = "", 0
        for last in range(1, len(ids) + 1):
            joined += pieces.feed([ids[last - 1]])
            if pieces.stopped:
                break
        assert pieces.stopped == bool(ends) or name == "sentencepiece"
        assert joined + pieces.finish() == expected
        assert "".join(pieces_of(tokenizer, ids[:last], rng, stops)) == expected
        stopped += pieces.stopped
    assert 100 < stopped < 500
