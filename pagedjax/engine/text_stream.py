"""The text of a growing sequence: incremental decoding, stop strings, and what may be shown already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"  # what a tokenizer prints for bytes that are not yet a whole character


class TextStream:
    """Turns tokens into text one at a time and watches for stop strings.

    Decoding token by token would lose the spaces and the characters that lie across token borders, so
    each step decodes a short window twice, without and with the new token, and keeps the difference.

    Args:
        decode: Token ids to text.
        stop: Strings that end the text; it ends before the earliest of them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._window_start = 0  # first token of the decoding window
        self._shown_end = 0  # tokens whose text is in `text`
        self.text = ""
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token; True where its text completes a stop string.

        Args:
            token_id: The next token.
            may_stop: False: a stop string that this token completes is text like any other.
        """
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window_start : self._shown_end])
        after = self._decode(self._ids[self._window_start :])
        if after.endswith(_BROKEN) or len(after) <= len(before):
            return False  # half a character, or nothing visible yet
        self._window_start, self._shown_end = self._shown_end, len(self._ids)
        return self._append(after[len(before) :], may_stop)

    def finish(self) -> None:
        """No token follows: take what is left, broken characters included."""
        if not self.stopped and self._shown_end < len(self._ids):
            before = self._decode(self._ids[self._window_start : self._shown_end])
            after = self._decode(self._ids[self._window_start :])
            self._shown_end = len(self._ids)
            self._append(after[len(before) :])

    def _append(self, piece: str, may_stop: bool = True) -> bool:
        searched = len(self.text)
        self.text += piece
        if not may_stop:
            return False
        found = [
            at for stop in self._stop if (at := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
        return self.stopped

    @property
    def settled(self) -> str:
        """Text that no later token can take back: without a tail that may become a stop string."""
        if self.stopped:
            return self.text
        held = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return self.text[: len(self.text) - held]
