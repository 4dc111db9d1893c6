"""The text of a growing sequence: incremental decoding, stop strings, and what may be shown already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"  # what a tokenizer prints for bytes that are not yet a whole character
_CHARACTER_BYTES = 4  # of the longest character in UTF-8
_MOST_WAITING = 8  # tokens whose text may wait for more bytes before it is asked which of it is certain


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
        self._ids: list[int] = []  # the decoding window: the last tokens shown, and those that wait
        self._num_shown = 0  # tokens of the window whose text is in `text`
        self._before: str | None = ""  # text of these; None: not decoded yet
        self._after = ""  # text of the whole window at the last token
        self.text = ""
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token; True where its text completes a stop string.

        Args:
            token_id: The next token.
            may_stop: False: a stop string that this token completes is text like any other.
        """
        self._ids.append(token_id)
        if self._before is None:
            self._before = self._decode(self._ids[: self._num_shown])
        before, last, self._after = self._before, self._after, self._decode(self._ids)
        end = len(self._ids)
        if self._after.endswith(_BROKEN) or len(self._after) <= len(before):
            # Half a character, or nothing visible yet. Those that wait are few, or each step would decode them all.
            if end - self._num_shown <= _MOST_WAITING:
                return False
            if self._after == last and not self._decode([token_id]):
                self._ids.pop()  # shows nothing, here and alone
                return False
            end = self._certain()
            if not end:
                return False
        shown = self._after if end == len(self._ids) else self._decode(self._ids[:end])
        piece = shown[len(before) :]
        self._shift(end)
        return self._append(piece, may_stop)

    def _certain(self) -> int:
        """Tokens of the window whose text no later token can change; 0: not known.

        A character has at most four bytes, and a token that shows something has at least one. So what stands before
        four such tokens is settled, unless a character lies across the border: then the parts decode to something
        else than the whole.
        """
        at = len(self._ids) - _CHARACTER_BYTES
        tail = self._ids[at:]
        whole = self._decode(self._ids[:at]) + self._decode(tail) == self._after
        return at if whole and all(self._decode([token]) for token in tail) else 0

    def _shift(self, end: int) -> None:
        """The window's first `end` tokens are shown; those shown before are no longer needed to decode the next."""
        del self._ids[: self._num_shown]
        self._num_shown = end - self._num_shown
        self._before = None

    def finish(self) -> None:
        """No token follows: take what is left, broken characters included."""
        if not self.stopped and self._num_shown < len(self._ids):
            before = self._decode(self._ids[: self._num_shown])
            piece = self._decode(self._ids)[len(before) :]
            self._shift(len(self._ids))
            self._append(piece)

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
