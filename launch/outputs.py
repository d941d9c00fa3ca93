"""What the Python API returns, in the shapes that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epmoe.engine.request import SamplingParams
from launch.completion import Completion


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability by the model, its rank (1 is the likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    Args:
        index: which of the prompt's ``n``.
        text: without the stop string, if one ended it.
        token_ids: all drawn tokens, those of an end token or stop string too.
        cumulative_logprob: sum over all drawn tokens so far; None unless log-probabilities were asked for.
        logprobs: for each token its own entry and those of the likeliest tokens, by token id.
        finish_reason: "stop", "length" or "abort"; "error" where the model gave no finite logits; None while it runs.
        stop_reason: the stop string, or the id of ``stop_token_ids``, that ended it; None for the model's end token.
            For an "error" a message that names the position and the remedy.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations; ``prompt`` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


@dataclass
class Reader:
    """Reads a completion piece by piece: ``text`` characters and ``tokens`` were given out, and perhaps its end."""

    completion: Completion
    params: SamplingParams
    tokenizer: Any
    text: int = 0
    tokens: int = 0
    ended: bool = False

    def read(self) -> CompletionOutput | None:
        """What is new since the last call; ``None`` if nothing is."""
        completion = self.completion
        reason = completion.finish_reason  # first: tokens that come meanwhile are read next time, before the end is
        tokens = completion.token_ids[self.tokens :]
        text = completion.text[self.text : completion.settled]
        if self.ended or not (tokens or text or reason):
            return None
        first = self.tokens
        self.text, self.tokens, self.ended = self.text + len(text), first + len(tokens), reason is not None
        logprobs = cumulative = None
        if self.params.logprobs is not None:
            entries = completion.logprobs[: self.tokens]
            cumulative = sum(entry["logprob"] for entry in entries)
            logprobs = [self._logprobs(*each) for each in zip(tokens, entries[first:])]
        stop_reason = completion.stop_reason if reason is not None else None
        if reason == "stop" and stop_reason is None and completion.token_ids[-1] in self.params.stop_token_ids:
            stop_reason = completion.token_ids[-1]
        return CompletionOutput(completion.index, text, tokens, cumulative, logprobs, reason, stop_reason)

    def _logprobs(self, token: int, entry: dict) -> dict[int, Logprob]:
        rows = {token: (entry["logprob"], entry["rank"])}
        for rank, (other, logprob) in enumerate(entry["top"], 1):
            rows.setdefault(other, (logprob, rank))
        return {id_: Logprob(*row, self.tokenizer.decode([id_])) for id_, row in rows.items()}
