"""A request, its sampling parameters, and the little state that the scheduler keeps for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from epmoe.ops.sampling import noise_stem
from placement.errors import UserError

MOST_SAMPLES = 1 << 14  # of one prompt


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
        for item in fields(self):
            object.__setattr__(self, item.name, _typed(item.name, getattr(self, item.name), str(item.type)))
        rules = {
            "n": (1 <= self.n <= MOST_SAMPLES, f"between 1 and {MOST_SAMPLES}"),
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

    @cached_property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any], source: str = "sampling parameters") -> SamplingParams:
        known = [item.name for item in fields(SamplingParams)]
        if unknown := sorted(set(raw) - set(known)):
            raise UserError(f"{source} has unknown keys {unknown}; known are {known}")
        return SamplingParams(**raw)


_SCALARS = {  # annotation -> (accepted, made, words)
    "int": (Integral, int, "a whole number below 2^63"),
    "float": (Real, float, "a number"),
    "str": (str, str, "a string"),
}


def _typed(key: str, value: object, annotation: str) -> Any:
    """The value as a plain one of its field's type; numpy's numbers and lists are taken too, ``None`` is no item."""
    kind, _, optional = annotation.partition(" | ")
    if value is None and optional:
        return None
    if kind == "bool":
        if type(value) is not bool:
            raise UserError(f"{key} is {value!r}; it must be True or False")
        return value
    if not kind.startswith("tuple["):
        return _scalar(key, value, kind)
    kind = kind.removeprefix("tuple[").removesuffix(", ...]")
    values = () if value is None else (value,) if isinstance(value, (str, bytes)) else value
    if not isinstance(values, Iterable):
        raise UserError(f"{key} is {value!r}; it must be a list")
    return tuple(_scalar(f"an item of {key}", each, kind) for each in values)


def _scalar(key: str, value: object, kind: str) -> Any:
    accepted, made, words = _SCALARS[kind]
    large = kind == "int" and isinstance(value, Integral) and not -(1 << 63) <= value < 1 << 63
    if not isinstance(value, accepted) or isinstance(value, bool) or large:
        raise UserError(f"{key} is {value!r}; it must be {words}")
    return made(value)


@dataclass(eq=False)
class Request:
    """One sequence on its home rank.

    ``published`` counts blocks that others were offered to share.  ``computed`` counts positions whose keys and values
    are written, or will be by a step already launched.  ``longest``: it ends with so many tokens, prompt and output.
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
    published: int = 0
    computed: int = 0
    longest: int = 0  # set by the scheduler
    pending: int = 0
    probe: int = 0
    row: int = -1  # row of the device's per-request state while running
    finish_reason: str | None = None

    @cached_property
    def noise_stem(self) -> int:
        """What the noise of all its draws has in common (see ``ops.sampling``)."""
        return noise_stem(self.seed, self.sample_index)

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt) + len(self.output)

    @property
    def total(self) -> int:
        return self.known + self.pending

    def token_at(self, position: int) -> int:
        """The token id at a position, or -1 if the host does not know it yet."""
        if position < len(self.prompt):
            return self.prompt[position]
        position -= len(self.prompt)
        return self.output[position] if position < len(self.output) else -1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known token ids at positions ``start`` to ``stop``."""
        P = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - P, 0) : max(stop - P, 0)]
