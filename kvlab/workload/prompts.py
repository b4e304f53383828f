"""Prompts from a file, or the bundled list of chat prompts."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.types import Request, SamplingParams, UserError
from kvlab.workload import rng
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.distributions import Arrivals, whole
from kvlab.workload.limits import check_lengths
from kvlab.workload.prompt_file import PromptLine, read_prompts
from kvlab.workload.sampling import sampling_params
from kvlab.workload.tokens import byte_chat, byte_ids

CHAT_PROMPTS = Path(__file__).with_name("chat_prompts.jsonl")
"""The bundled list: varied in topic, length and script; some share a system prompt."""


@dataclass
class _Prepared:
    """A prompt that was read, tokenised and checked; ids as 32-bit numbers, so that a list of them is no bigger than its text."""

    line: PromptLine
    token_ids: array[int]
    text: str | None


class PromptWorkload(Workload):
    """The prompts of a file, in its order.

    `messages` go through the model's chat template, `prompt` texts do not unless `as_chat`. What a line says about sampling wins
    over `sampling`. Arrivals: the lines' `arrival_s`, or else the parameter `arrivals`, or else all at once.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        as_chat: bool = False,
        limit: int | None = None,
        repeat: int = 1,
        arrivals: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        abort: Mapping[str, Any] | None = None,
    ) -> None:
        """path: .jsonl (fields: `prompt_file.FIELDS`, all of SamplingParams) or text, a prompt a line; None: the bundled chats.

        limit: the first so many prompts. repeat: the list so many times over; with arrival times in the file, each time begins
        when the last prompt of the time before has arrived.
        """
        super().__init__(concurrency=concurrency, abort=abort)
        self._path = CHAT_PROMPTS if path is None else Path(path)
        self._as_chat = as_chat
        self._limit = None if limit is None else whole("workload.limit", limit, 1)
        self._repeat = whole("workload.repeat", repeat, 1)
        self._arrivals = arrivals
        sampling_params("workload.sampling", sampling)
        self._sampling = sampling

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Read, tokenise and check the whole file."""
        if not self._path.is_file():
            raise UserError(f"There is no file of prompts {str(self._path)!r} (workload.path; relative to {Path.cwd()}).")
        lines = read_prompts(self._path, self._limit, self.notes)
        if ctx.tokenizer is None and any(line.kind != "prompt_token_ids" for line in lines):
            self.notes.append("This run has no tokenizer: the prompts are the UTF-8 bytes of their texts.")
        self._prompts = [self._prepare(line, ctx) for line in lines]
        self._check_ids()
        lens = np.array([len(p.token_ids) for p in self._prompts], dtype=np.int64)
        longest = self._prompts[int(lens.argmax())].line.where
        outputs = np.array([self._params(p.line).max_tokens for p in self._prompts], dtype=np.int64)
        check_lengths(ctx, lens, outputs, self.notes, f"Shorten them, or raise max_model_len; the longest is {longest}.")
        return self._arrival_times(ctx)

    def _prepare(self, line: PromptLine, ctx: WorkloadContext) -> _Prepared:
        """Tokenise a line. UserError for an empty result, an id outside the vocabulary, or messages that the template refuses."""
        self._params(line)
        text: str | None = None
        if line.kind == "prompt_token_ids":
            ids = line.content
        elif line.kind == "prompt" and not self._as_chat:
            text = line.content
            ids = ctx.tokenizer.encode(text) if ctx.tokenizer else byte_ids(text, ctx.vocab_size)
        else:
            messages = line.content if line.kind == "messages" else [{"role": "user", "content": line.content}]
            text = messages[-1]["content"]
            ids = self._chat_ids(line.where, messages, ctx)
        if not len(ids):
            raise UserError(f"{line.where}: the prompt has no tokens; at least one is needed.")
        if max(ids) >= ctx.vocab_size:
            raise UserError(f"{line.where}: token id {max(ids)} is outside the model's vocabulary of {ctx.vocab_size}.")
        line.content = None  # the ids say it all; the text is kept once
        return _Prepared(line, array("I", ids), text)

    def _chat_ids(self, where: str, messages: list[dict[str, Any]], ctx: WorkloadContext) -> list[int]:
        if ctx.tokenizer is None:
            return byte_chat(messages, ctx.vocab_size)
        try:
            return ctx.tokenizer.apply_chat(messages)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except Exception as error:  # a tokenizer of one's own raises what it likes
            raise UserError(f"{where}: the model's chat template refuses these messages ({error}).") from error

    def _params(self, line: PromptLine) -> SamplingParams:
        return sampling_params(line.where, self._sampling, line.sampling)

    def _check_ids(self) -> None:
        """Request ids must be unique within the file (repetitions add their number)."""
        seen: dict[str, str] = {}
        for prompt in self._prompts:
            request_id = prompt.line.fields.get("request_id")
            if request_id is not None and request_id in seen:
                raise UserError(f"{prompt.line.where}: request_id {request_id!r} is also that of {seen[request_id]}.")
            if request_id is not None:
                seen[request_id] = prompt.line.where

    def _arrival_times(self, ctx: WorkloadContext) -> list[float]:
        given = [p.line.fields.get("arrival_s") for p in self._prompts]
        missing = [i for i, time in enumerate(given) if time is None]
        self._span_s = 0.0
        if len(missing) == len(given):
            drawn = Arrivals("workload.arrivals", self._arrivals, self.notes)
            times: list[float] = drawn.draw(rng.generator(ctx.seed, rng.ARRIVALS), len(given) * self._repeat).tolist()
            return times
        if missing:
            where = self._prompts[missing[0]].line.where
            raise UserError(f"{where}: no arrival_s, though other lines have one. Give it on every line or on none.")
        if self._arrivals is not None:
            self.notes.append("workload.arrivals has no effect: the file has arrival_s.")
        known = [float(time) for time in given if time is not None]
        self._span_s = max(known)
        return [time + turn * self._span_s for turn in range(self._repeat) for time in known]

    def make(self, index: int) -> Request:
        """Prompt `index` modulo the length of the list."""
        turn, place = divmod(index, len(self._prompts))
        prompt = self._prompts[place]
        fields = dict(prompt.line.fields)
        request_id = fields.pop("request_id", f"prompt-{place}") + (f"-{turn}" if self._repeat > 1 else "")
        fields.pop("arrival_s", None)
        if "abort_at_s" in fields and turn:
            fields["abort_at_s"] += turn * self._span_s
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids.tolist(),
            sampling=self._params(prompt.line),
            prompt=prompt.text,
            **fields,
        )
