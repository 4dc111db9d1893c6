"""Text as it grows: characters that lie across tokens, stop strings across tokens, what may be shown."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax.engine.text_stream import TextStream
from pagedjax.models.tokenizer import ByteTokenizer

TEXT = "naïve — 東京 🙂🙃 e\u0301 end"


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_no_broken_character_is_ever_shown(cut):
    """One byte a token, and tokens of several bytes: what is shown only grows and is a prefix of the text."""
    data = TEXT.encode()
    pieces = [data[i : i + cut] for i in range(0, len(data), cut)]
    stream = TextStream(lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"))
    for token in range(len(pieces)):
        stream.push(token)
        assert "\ufffd" not in stream.settled
        assert TEXT.startswith(stream.settled)
    stream.finish()
    assert stream.text == TEXT


def test_bytes_that_never_become_a_character_appear_at_the_end():
    stream = TextStream(ByteTokenizer().decode)
    for token in b"ok \xe6\x9d":
        stream.push(token)
    assert stream.settled == "ok "
    stream.finish()
    assert stream.text.startswith("ok \ufffd")


def test_a_stop_string_before_its_time_is_text():
    stream = TextStream(ByteTokenizer().decode, ["END"])
    seen = [stream.push(token, may_stop=at > 4) for at, token in enumerate(b"aENDb END more"[:9])]
    assert seen == [False] * 8 + [True]
    assert stream.text == "aENDb "


def test_random_texts_and_stops_equal_a_search_of_the_whole():
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice(list("ab🙂é"), size=20))
        stop = "".join(rng.choice(list("ab🙂é"), size=int(rng.integers(1, 4))))
        stream = TextStream(ByteTokenizer().decode, [stop])
        for token in text.encode():
            if stream.push(token):
                break
        stream.finish()
        assert stream.text == text.split(stop)[0]


@pytest.mark.parametrize(
    "pattern", [[0x80], [0xE2, 0x82], [0xF0, 0x9F, 0x98], [256], [0xE2, 256], "random"], ids=str
)
def test_F027_unfinished_bytes_decode_in_linear_time(pattern):
    """Counted, not timed: tokens that go through decode. 256 is a token that shows nothing."""

    def decoded(count):
        asked = 0

        def decode(ids):
            nonlocal asked
            asked += len(ids)
            return bytes(i for i in ids if i < 256).decode(errors="replace")

        ids = (
            np.resize(pattern, count)
            if pattern != "random"
            else np.random.default_rng(1).integers(128, 257, count)
        )
        stream = TextStream(decode)
        for token in ids.tolist():
            stream.push(token)
        stream.finish()
        work, whole = asked, decode(ids.tolist())
        assert stream.text == whole
        return work

    once, twice = decoded(3000), decoded(6000)
    assert twice <= 2.3 * once and once < 60 * 3000


def test_F027_text_among_unfinished_bytes_is_that_of_the_whole():
    """Characters cut anywhere, broken ones, tokens that show nothing: the whole decoded at once is the judge."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        data = bytearray("".join(rng.choice(list("ab🙂é€"), size=12)).encode())
        for _ in range(int(rng.integers(0, 8))):
            at = int(rng.integers(0, len(data) + 1))
            data[at:at] = bytes(
                rng.choice([0x80, 0xE2, 0x82, 0xF0, 0x9F], size=int(rng.integers(1, 20))).tolist()
            )
        ids = list(data)
        for _ in range(int(rng.integers(0, 30))):
            ids.insert(int(rng.integers(0, len(ids) + 1)), 256)

        def decode(ids):
            return bytes(i for i in ids if i < 256).decode(errors="replace")

        stream = TextStream(decode)
        for token in ids:
            stream.push(token)
            assert decode(ids).startswith(stream.text)
        stream.finish()
        assert stream.text == decode(ids)
