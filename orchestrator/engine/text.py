"""Text of an output while its tokens come, and where it stops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from orchestrator.engine.base import Request
from orchestrator.engine.media import RequestError

_TORN = "\ufffd"
"""How a tokenizer spells bytes that are no character yet."""


def stop_strings(request: Request) -> tuple[str, ...]:
    """What ends a request's text.

    Raises:
        RequestError: one of them is empty or no text.
    """
    if isinstance(request.stop, str) or not isinstance(request.stop, Collection):
        one = request.stop if isinstance(request.stop, str) else "END"
        raise RequestError(f"stop is {request.stop!r}: it must be a tuple of strings, such as ({one!r},)")
    for text in request.stop:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop has {text!r}: it must have strings of at least one character")
    return tuple(request.stop)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that a tokenizer leaves out of a text: those that it names, and the many that only its file marks."""
    known = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return frozenset(token for token in known if not tokenizer.decode([token], skip_special_tokens=True))


class TextStream:
    """Turns tokens into text one by one.

    A tokenizer whose single bytes are tokens (`<0xE4>`) spells a run of them as torn throughout if it is no UTF-8 as a
    whole: what stood there before a wrong byte stays in the text.

    Args:
        tokenizer: decodes token ids.
        special: tokens without text.
        stop: strings that end the text just before them.

    Attributes:
        text: what is known so far; characters of which bytes are missing are not in it.
        stopped: whether a stop string has come; then the text is whole.
    """

    def __init__(self, tokenizer: Any, special: frozenset[int], stop: Sequence[str] = ()) -> None:
        self._decode: Callable[[list[int]], str] = tokenizer.decode
        self._special, self._stop = special, tuple(stop)
        self._ids: list[int] = []
        # Text of a token depends on those before it, so the piece before is decoded again with it: from `_begin` to
        # `_read`. Of what comes from `_begin` on, `_known` characters are in the text.
        self._begin = self._read = self._known = 0
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; whether the text is whole now, because a stop string is."""
        if self.stopped or token in self._special:
            return self.stopped
        self._ids.append(token)
        now = self._decode(self._ids[self._begin :])
        sure = len(now) - self._unsure(now)
        self._grow(now[self._known : sure])
        self._known = max(self._known, sure)
        if sure == len(now):
            self._begin, self._read = self._read, len(self._ids)
            self._known = len(self._decode(self._ids[self._begin :]))
        return self.stopped

    def _unsure(self, now: str) -> int:
        """Characters at the end that tokens to come can change: a torn one, or one for each byte of it."""
        torn = len(now) - len(now.rstrip(_TORN))
        # No more than three tokens wait for their character's last byte; after those it is no character.
        return torn if len(self._ids) - self._read <= 3 else min(torn, 1)

    def _grow(self, new: str) -> None:
        old, self.text = len(self.text), self.text + new
        found = [self.text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stop]
        first = min((at for at in found if at >= 0), default=None)
        if first is not None:
            self.text, self.stopped = self.text[:first], True

    def finish(self) -> None:
        """No token comes any more: what was kept back for its missing bytes becomes text."""
        if not self.stopped:
            now = self._decode(self._ids[self._begin :])
            self.text += now[self._known :]
            self._known = max(self._known, len(now))
        self._stop = ()

    def take(self) -> str:
        """The text since the last call, but for an end that may be the beginning of a stop string."""
        stop = len(self.text) - (0 if self.stopped else self._doubtful())
        new = self.text[self._given : stop]
        self._given = max(self._given, stop)
        return new

    def _doubtful(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = min(len(self.text), max((len(stop) - 1 for stop in self._stop), default=0))
        ends = (size for size in range(longest, 0, -1) if self._may_begin(self.text[-size:]))
        return next(ends, 0)

    def _may_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)
