"""A request, its sampling parameters, and the little state that the scheduler keeps for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from placement.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop; the names that vLLM's users know.

    Args:
        n: independent continuations of one prompt.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities reach p.
        min_p: keep tokens at least this share of the most likely one.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens in the prompt or the output.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once or per use.
        stop: strings that end the text (left out of it).
        stop_token_ids: ids that end the output, besides the model's own end tokens.
        ignore_eos: do not stop at the model's end tokens.
        max_tokens: most tokens to generate.
        logprobs: report the log-probabilities of the chosen token and of this many likeliest ones.
        seed: of the sampling noise; a request without one gets its own.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        rules = {
            "n": (self.n >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "0 (greedy) or more, and finite"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "above 0; 1 is none"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "between -2 and 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "logprobs": (self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20, or none"),
            "seed": (self.seed is None or 0 <= self.seed < 1 << 63, "a whole number from 0 to 2^63 - 1, or none"),
            "stop": (all(self.stop), "strings that are not empty"),
        }
        for key, (holds, rule) in rules.items():
            if not holds:
                raise UserError(f"{key} is {getattr(self, key)!r}; it must be {rule}")

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any], source: str = "sampling parameters") -> SamplingParams:
        known = [item.name for item in fields(SamplingParams)]
        if unknown := sorted(set(raw) - set(known)):
            raise UserError(f"{source} has unknown keys {unknown}; known are {known}")
        try:
            return SamplingParams(**raw)
        except TypeError as error:
            raise UserError(f"{source}: a value has the wrong type ({error}); see SamplingParams") from None


@dataclass(eq=False)
class Request:
    """One sequence on its home rank.

    ``computed`` counts positions whose keys and values are written, or will be by a step already launched.
    ``pending`` counts sampled tokens that the host does not know yet (they are on the device).  ``probe``: run only so
    many tokens until it is decided which rank becomes the home (0: decided).
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    sample_index: int = 0
    home: int = 0
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks, in order (see kv_cache)
    computed: int = 0
    pending: int = 0
    probe: int = 0
    row: int = -1  # row of the device's per-request state while running
    finish_reason: str | None = None

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt) + len(self.output)

    @property
    def total(self) -> int:
        return self.known + self.pending

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known token ids at positions ``start`` to ``stop``."""
        P = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - P, 0) : max(stop - P, 0)]
