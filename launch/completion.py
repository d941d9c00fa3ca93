"""One request as its user sees it: tokens come in, text comes out, a stop string ends it."""

from __future__ import annotations

from typing import Any

from launch.detokenize import Detokenizer


class Completion:
    """What a request has produced so far.  ``finish_reason`` is ``None`` while it runs."""

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._stop = stop
        self._detokenizer = Detokenizer(tokenizer)

    def take(self, token_ids: list[int], finish_reason: str | None) -> bool:
        """Add new tokens; true if a stop string ended the text here, so that the ranks must be told.

        The stop string is left out of the text; the tokens that complete it stay in ``token_ids``.
        """
        if self.finish_reason is not None:  # tokens that were under way when it ended
            return False
        for token in token_ids:
            self.token_ids.append(token)
            self.text += self._detokenizer.push([token])
            if self._cut_at_stop_string():
                return finish_reason is None
        if finish_reason is not None:
            self.text += self._detokenizer.push([], last=True)
            if not self._cut_at_stop_string():
                self.finish_reason = finish_reason
        return False

    def _cut_at_stop_string(self) -> bool:
        found = [at for at in map(self.text.find, self._stop) if at >= 0]
        if found:
            self.text, self.finish_reason = self.text[: min(found)], "stop"
        return bool(found)

    def to_dict(self) -> dict:
        """The entry of ``--json``."""
        keys = ("prompt", "prompt_token_ids", "token_ids", "text", "finish_reason")
        return {key: getattr(self, key) for key in keys}
