"""The Python API: ranks on this machine behind a few calls with the shapes that vLLM's users know.

from epmoe import LLM, SamplingParams

with LLM("MODEL", ranks=2) as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epmoe.engine.request import SamplingParams
from launch import recording
from launch.args import complete_settings
from launch.completion import Completion
from launch.env import read_torchrun
from launch.failure import RankFailure
from launch.outputs import Reader, RequestOutput
from launch.plans import choose_plan, with_plan
from launch.prompts import Prompt, as_prompts, require_writable
from launch.requests import Requests
from launch.session import Session, spawned
from launch.tokenizer import encode, load_tokenizer, tokenizer_sha256
from placement.errors import UserError
from placement.plan import MoEShape, Plan


class RemoteTraceback(Exception):
    """Where in a rank the error was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class _Recording:
    path: str
    shape: MoEShape
    tokenizer_sha256: str


@dataclass(frozen=True)
class _Group:
    """A prompt's ``n`` requests."""

    request_id: str
    params: SamplingParams
    completions: list[Completion]
    numbers: list[int]  # their ids on the ranks, once sent

    @property
    def running(self) -> bool:
        return any(completion.finish_reason is None for completion in self.completions)

    def output(self, outputs: list, finished: bool) -> RequestOutput:
        first = self.completions[0]
        return RequestOutput(self.request_id, first.prompt, first.prompt_token_ids, outputs, finished)


class LLM:
    """A model on ``ranks`` processes of this machine; they end with :meth:`close`, this object, or the interpreter.

    Args:
        model: folder of a checkpoint, or a model's id on the hub.
        placement: "linear", "round-robin", "greedy", "auto", a plan file, or a ``Plan``.
        trace: routing trace, or several, that "greedy" and "auto" solve for; "demo" are the package's.
        record_trace: file that the routing of all tokens is written to when this is closed.
        record_tokens: most tokens to record, over all ranks; what comes later is left out.
        settings: fields of ``epmoe.config.EngineConfig``: device, dtype, combine, deterministic, max_model_len, ...

    Attributes ``engine``, ``plan`` and ``tokenizer`` show what was chosen.  Any thread may call any method.

    Raises:
        UserError: a value is wrong; the message says which, why, and what to do.
        RankFailure: a rank failed (from any method); its message names the rank, and all ranks have been ended.
    """

    def __init__(
        self,
        model: str | Path,
        ranks: int = 1,
        placement: str | Path | Plan = "linear",
        trace: str | Path | Sequence[str | Path] | None = None,
        *,
        record_trace: str | Path | None = None,
        record_tokens: int = recording.RECORD_TOKENS,
        **settings: Any,
    ) -> None:
        starting = spawned(_checked_ranks(ranks))
        engine, self._model = complete_settings(str(model), settings, starting, "LLM")
        self.plan, _ = choose_plan(placement, trace, self._model.moe_shape, ranks)
        record = None
        if record_trace is not None:
            if not isinstance(record_trace, (str, Path)):
                raise UserError(f"record_trace is {record_trace!r}; give a path for the trace's file")
            require_writable(str(record_trace))
            engine = replace(engine, record_tokens=recording.limit_per_rank(record_tokens, ranks))
            record = _Recording(str(record_trace), self._model.moe_shape, tokenizer_sha256(engine.model))
        self.engine = with_plan(engine, self.plan, placement)
        session = Session(starting, self.engine, _say)
        try:
            self.tokenizer = load_tokenizer(engine.model)
            with _rank_errors():
                session.wait_ready()
        except BaseException:
            session.close()
            raise
        self._requests = Requests(session, keep_lengths=record is not None)
        self._finalizer = weakref.finalize(self, _end, self._requests, record)
        self._groups: dict[str, _Group] = {}
        self._made = 0

    # -- calls ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: object, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue prompts; one result each, in order.

        Args:
            prompts: one, or a list of them: a string, a list of token ids, ``{"prompt": TEXT}`` or
                ``{"prompt_token_ids": IDS}``.
            sampling_params: for all, or one for each; the default is ``SamplingParams()``.
        """
        return self._finish(self._make(as_prompts(prompts), sampling_params))

    def chat(
        self,
        messages: Sequence[dict] | Sequence[Sequence[dict]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, written out by the checkpoint's chat template.

        Args:
            messages: ``[{"role": ..., "content": ...}, ...]``, or a list of those.
            template: passed to the tokenizer's ``apply_chat_template``: ``chat_template``, ``tools``,
                ``add_generation_prompt`` (default true), and variables of the template.
        """
        if not isinstance(messages, (list, tuple)):
            raise UserError(
                f"messages is {type(messages).__name__}; give a list of {{role, content}}, or a list of those"
            )
        one = bool(messages) and isinstance(messages[0], dict)
        prompts = [
            self._prompt_of(each, number, template) for number, each in enumerate([messages] if one else messages)
        ]
        return self._finish(self._make(prompts, sampling_params))

    def stream(self, prompt: object, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt; yields what is new, as it comes.

        Each ``outputs`` holds only the samples that gained something, with the new text and tokens alone.  Text that
        could begin a stop string is kept back until it is known not to.  Closing the iterator early aborts the request.
        """
        groups = self._make(as_prompts(prompt), sampling_params)
        if len(groups) != 1:
            raise UserError(f"stream was given {len(groups)} prompts; it takes one, generate takes many")
        return self._increments(groups[0])

    def abort(self, request_id: str) -> None:
        """End a request at the next step, from another thread or while it streams; its ``finish_reason`` is "abort".

        A request that has ended is left alone.
        """
        group = self._groups.get(request_id)
        for number in group.numbers if group is not None else ():
            self._requests.abort(number)

    def close(self) -> None:
        """End the ranks, and write the trace if one is recorded.  Requests under way are aborted."""
        with _rank_errors():
            self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- parts ----------------------------------------------------------------------------------------------------

    def _prompt_of(self, messages: Sequence[dict], number: int, template: dict) -> Prompt:
        tokenizer, where = self.tokenizer, f"conversation {number}"
        if "tokenize" in template or "conversation" in template:
            raise UserError("chat writes out and tokenizes the messages itself; leave tokenize and conversation out")
        if template.get("chat_template") is None and not tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {self.engine.model} has no chat template; pass chat_template=TEXT, or use generate"
            )
        try:
            text = tokenizer.apply_chat_template(
                list(messages), **{"add_generation_prompt": True, **template}, tokenize=False
            )
        except Exception as error:  # jinja's own errors, and whatever the template's expressions raise
            raise UserError(f"{where}: the chat template refuses the messages: {error}; change them") from error
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids  # the template writes its own
        return Prompt(text, tuple(ids), where)

    def _make(self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[_Group]:
        """Requests that the engine can take, not yet sent: one wrong prompt fails the call before any runs."""
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, (list, tuple)) else list(params)
        if len(each) != len(prompts):
            raise UserError(f"{len(each)} sampling_params for {len(prompts)} prompts; give one, or one for each")
        if wrong := next((p for p in each if not isinstance(p, SamplingParams)), None):
            raise UserError(f"sampling_params is {type(wrong).__name__}; give SamplingParams(...)")
        groups = []
        for prompt, chosen in zip(prompts, each):
            ids = encode(prompt, self.tokenizer, self.engine, self._model)
            samples = [Completion(prompt.text, ids, self.tokenizer, chosen.stop, index) for index in range(chosen.n)]
            groups.append(_Group(str(self._made), chosen, samples, []))
            self._made += 1
        return groups

    def _finish(self, groups: list[_Group]) -> list[RequestOutput]:
        with self._under_way(groups):
            while any(group.running for group in groups):
                self._requests.advance()
        return [group.output([reader.read() for reader in self._readers(group)], True) for group in groups]

    def _increments(self, group: _Group) -> Iterator[RequestOutput]:
        readers = self._readers(group)
        with self._under_way([group]):
            while not all(reader.ended for reader in readers):
                self._requests.advance()
                gained = [output for reader in readers if (output := reader.read()) is not None]
                if gained:
                    yield group.output(gained, all(reader.ended for reader in readers))

    def _readers(self, group: _Group) -> list[Reader]:
        return [Reader(completion, group.params, self.tokenizer) for completion in group.completions]

    @contextmanager
    def _under_way(self, groups: list[_Group]) -> Iterator[None]:
        """Send the groups' requests; on leaving, however, abort those that have not ended."""
        try:
            with _rank_errors(self._requests, self._finalizer):
                for group in groups:
                    self._groups[group.request_id] = group
                    group.numbers.extend(self._requests.submit(each, group.params) for each in group.completions)
                yield
        finally:
            for group in groups:
                self._groups.pop(group.request_id, None)  # not there if an earlier one could not be sent
                for number, completion in zip(group.numbers, group.completions):
                    if completion.finish_reason is None:
                        self._requests.abort(number)


@contextmanager
def _rank_errors(requests: Requests | None = None, finalizer: weakref.finalize | None = None) -> Iterator[None]:
    """A failed rank ends the others, and is raised as one error that shows where in the rank it happened."""
    try:
        yield
    except RankFailure as failure:
        if requests is not None:
            finalizer.detach()
            requests.close(str(failure))
        if failure.user_error:
            raise UserError(failure.reason) from None
        raise failure from (RemoteTraceback(failure.details) if failure.details else None)


def _end(requests: Requests, record: _Recording | None) -> None:
    try:
        if record is not None:
            requests.stop()
            messages, lengths = requests.session.recorded, requests.lengths()
            merged = recording.merge(messages, record.shape, lengths, record.tokenizer_sha256)
            _say(recording.save(merged, record.path))
    finally:
        requests.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _checked_ranks(ranks: int) -> int:
    if type(ranks) is not int or ranks < 1:
        raise UserError(f"ranks is {ranks!r}; it must be a whole number of at least 1")
    if read_torchrun() is not None:
        raise UserError("LLM starts its ranks itself; run the script with python, or use torchrun -m launch generate")
    return ranks
