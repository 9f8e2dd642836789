"""Text of an output while its tokens come, by tokenizers whose tokens are bytes or words."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from orchestrator.engine.text import TextStream, special_ids


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def streamed(data: bytes, *stop: str) -> tuple[list[str], TextStream]:
    stream, taken = TextStream(Letters(), frozenset({0}), stop), []
    for token in data:
        done = stream.push(token)
        taken.append(stream.take())
        if done:
            break
    stream.finish()
    return [*taken, stream.take()], stream


def test_text_waits_for_whole_characters_and_for_what_may_be_a_stop_string() -> None:
    assert streamed("aé".encode())[0] == ["a", "", "é", ""]
    assert streamed(b"\xff\xfeab\xe2\x82\xac!")[0] == ["", "", "\ufffd\ufffda", "b", "", "", "€", "!", ""]
    assert streamed(b"a\xc3")[0] == ["a", "", "\ufffd"]
    assert streamed(b"abEND", "END")[0] == ["a", "b", "", "", "", ""]
    assert streamed(b"abENd", "END")[0] == ["a", "b", "", "", "ENd", ""]
    assert streamed(b"abEN", "END")[0] == ["a", "b", "", "", "EN"]
    assert streamed(b"a\x00b")[0] == ["a", "", "b", ""]


def test_the_first_stop_string_counts() -> None:
    pieces, stream = streamed(b"one two three", "three", "o t")
    assert ("".join(pieces), stream.text, stream.stopped) == ("one tw", "one tw", True)
    assert streamed(b"aaab", "aab")[1].text == "a"


@pytest.fixture(scope="module")
def pieces() -> Any:
    """As of Llama 2: words and, for what is in no word, single bytes; the last token is special by its file alone."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581one", "two"]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<|turn|>", special=True)])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def spelled(text: str) -> list[int]:
    return [byte + 2 for byte in text.encode()]


def test_characters_of_several_byte_tokens_come_whole(pieces: Any) -> None:
    one, two = (pieces.convert_tokens_to_ids(word) for word in ("\u2581one", "two"))
    ids = [one, one, *spelled("你好\n😀"), two, *spelled("é")]
    stream, taken = TextStream(pieces, special_ids(pieces)), []
    for token in ids:
        stream.push(token)
        taken.append(stream.take())
    assert taken == ["one", " one", "", "", "你", "", "", "好", "\n", "", "", "", "😀", "two", "", "é"]
    assert stream.text == pieces.decode(ids)
    torn = TextStream(pieces, special_ids(pieces))
    for token in [two, *spelled("é")[:1]]:
        torn.push(token)
    torn.finish()
    assert torn.take() == pieces.decode([two, *spelled("é")[:1]]) == "two\ufffd"


def test_a_stop_string_of_byte_tokens_ends_the_text(pieces: Any) -> None:
    stream = TextStream(pieces, special_ids(pieces), ("好",))
    assert [stream.push(token) for token in spelled("你好")] == [False] * 5 + [True]
    assert stream.text == "你"


def test_what_only_the_file_calls_special_has_no_text(pieces: Any) -> None:
    two, turn = (pieces.convert_tokens_to_ids(word) for word in ("two", "<|turn|>"))
    assert turn not in pieces.all_special_ids
    stream = TextStream(pieces, special_ids(pieces))
    for token in (two, turn, two):
        stream.push(token)
    stream.finish()
    assert stream.take() == pieces.decode([two, turn, two], skip_special_tokens=True) == "twotwo"
