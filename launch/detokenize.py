"""Token ids to text, as they come."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\ufffd"  # what the tokenizer shows for the first bytes of a character


class Detokenizer:
    """Text of one request.  ``tokenizer`` needs ``decode(ids, skip_special_tokens=)``.

    A token's text can depend on its neighbours (spaces, bytes of one character), so each step decodes a short window
    twice: with and without the new tokens.  What the second adds is new text, unless it ends inside a character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # of the window
        self._shown = 0  # tokens whose text is out

    def push(self, ids: list[int], last: bool = False) -> str:
        """New text after ``ids``; with ``last`` an unfinished character is given out as it is."""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._start : self._shown])
        after = self._decode(self._ids[self._start :])
        if after.endswith(UNFINISHED) and not last:
            return ""
        new = after[len(before) :]
        self._start, self._shown = self._shown, len(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
