"""One request as its user sees it: tokens come in, text comes out, a stop string ends it."""

from __future__ import annotations

from typing import Any

from launch.detokenize import Detokenizer


class Completion:
    """What a request has produced so far.  ``finish_reason`` is ``None`` while it runs.

    ``index`` numbers the samples of one prompt; ``stop_reason`` is the stop string that ended the text, if one did, and
    what went wrong if the reason is "error".
    ``logprobs`` has an entry per token if the request asked for them (see ``epmoe.engine.runner.Logprobs``).
    """

    def __init__(
        self, prompt: str | None, prompt_token_ids: list[int], tokenizer: Any, stop: tuple[str, ...], index: int = 0
    ) -> None:
        self.prompt, self.prompt_token_ids, self.index = prompt, prompt_token_ids, index
        self.token_ids: list[int] = []
        self.logprobs: list[dict] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self._stop = stop
        self._detokenizer = Detokenizer(tokenizer)

    def take(self, token_ids: list[int], finish_reason: str | None, extra: dict | None = None) -> bool:
        """Add new tokens; true if a stop string ended the text here, so that the ranks must be told.

        The stop string is left out of the text; the tokens that complete it stay in ``token_ids``.
        """
        if self.finish_reason is not None:  # tokens that were under way when it ended
            return False
        if extra is not None:
            assert len(token_ids) == 1, f"log-probabilities of one token came with {len(token_ids)}"
            self.logprobs.append(extra)
        for token in token_ids:
            self.token_ids.append(token)
            self.text += self._detokenizer.push([token])
            if self._cut_at_stop_string():
                return finish_reason is None
        if finish_reason is not None:
            self.text += self._detokenizer.push([], last=True)
            if not self._cut_at_stop_string():
                self.stop_reason = self._not_finite() if finish_reason == "error" else None
                self.finish_reason = finish_reason
        return False

    def _not_finite(self) -> str:
        position = len(self.prompt_token_ids) + len(self.token_ids)
        return (
            f"the logits for position {position} are not finite numbers (NaN or infinite), so no token can be drawn;"
            " the checkpoint is damaged, or its values overflow: try dtype float32 or bfloat16, or download it again"
        )

    @property
    def run_tokens(self) -> int:
        """Tokens of prompt and output that went through the model: all but the last drawn one."""
        return len(self.prompt_token_ids) + max(len(self.token_ids) - 1, 0)

    @property
    def settled(self) -> int:
        """Characters of ``text`` that stay, whatever follows: an end that could begin a stop string may yet go."""
        if self.finish_reason is not None:
            return len(self.text)
        starts = (stop[:length] for stop in self._stop for length in range(1, len(stop)))
        return len(self.text) - max((len(start) for start in starts if self.text.endswith(start)), default=0)

    def _cut_at_stop_string(self) -> bool:
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop)) >= 0]
        if found:
            at, self.stop_reason = min(found, key=lambda item: item[0])
            self.text, self.finish_reason = self.text[:at], "stop"
        return bool(found)

    def to_dict(self) -> dict:
        """The entry of ``--json``."""
        keys = ("prompt", "prompt_token_ids", "token_ids", "text", "finish_reason")
        return {key: getattr(self, key) for key in keys}
