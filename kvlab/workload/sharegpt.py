"""Conversations in ShareGPT's form (JSON): `[{"id": ..., "conversations": [{"from": "human", "value": "..."}, ...]}, ...]`.

Source: the conversations that users shared on ShareGPT, as cleaned for Vicuna (2023); vLLM, SGLang and others take their benchmark
prompts from them. Each assistant turn is a request whose prompt is all turns before it. There are no times. Beside "conversations" an
item may have "cache" and "cache_until" for all its requests (see `kvlab.types.Request`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.types import Request, RequestRecord, UserError
from kvlab.types.text import half_pair, left_out
from kvlab.workload import rng
from kvlab.workload.base import Tokenizer, Workload, WorkloadContext
from kvlab.workload.distributions import Arrivals, Numbers, whole
from kvlab.workload.hashed import caching_field
from kvlab.workload.sampling import LengthSampling
from kvlab.workload.tokens import byte_chat, byte_ids
from kvlab.workload.traces import beginning, find_trace, numbered_lines, open_text, reading, trace_folders

ROLES = {
    "system": "system", "human": "user", "user": "user",
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard", "model", "bot"), "assistant"),
}  # fmt: skip
"""Who speaks (`from`, or `role`), as the public files spell it -> role in a chat template."""

ANSWERED = ("stop", "length")
"""Finish reasons after which a user goes on."""

_CHUNK = 1 << 20
_SPACE = re.compile(r"[\s,]*")


@dataclass
class Conversation:
    """Messages (`role`, `content`), no two of one role in a row, the first not the assistant's. `number`: place in the file from 1.
    `cache_until`: position from which each of its requests is kept out of the prefix cache (None: not at all)."""

    number: int
    messages: list[dict[str, str]]
    cache_until: int | None = None

    @property
    def answers(self) -> list[int]:
        """Places of the assistant's messages: each is a request."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    def prompt(self, place: int, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
        """Token ids of all messages before an answer. Without a tokenizer: UTF-8 bytes in ChatML's shape.

        Raises:
            UserError: the model's chat template refuses the messages.
        """
        before = self.messages[:place]
        if tokenizer is None:
            return byte_chat(before, vocab_size)
        try:
            return tokenizer.apply_chat(before)
        except UserError:
            raise
        except Exception as error:  # templates are programs of the model's makers: they raise what they like
            raise UserError(f"Conversation {self.number}: the model's chat template refuses these messages ({error}).") from error

    def answer(self, place: int, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
        """Token ids of an answer, at least one."""
        text = self.messages[place]["content"]
        if tokenizer is None:
            return byte_ids(text, vocab_size)
        ids = tokenizer.encode(text)
        bos: int | None = getattr(tokenizer, "bos_token_id", None)
        return ids[1:] if len(ids) > 1 and ids[0] == bos else ids


def read_sharegpt(path: Path, notes: list[str] | None = None) -> Generator[Conversation, None, None]:
    """The conversations of a file (.json: one list; .jsonl: one a line; .gz of either), one at a time: no more than one is held.

    Repairs, counted in `notes` at the end or when the generator is closed: what the assistant says before anybody asked is left
    out, empty messages too, messages of one role in a row become one, conversations without an answer are left out, and those whose
    strings are no text (half of a surrogate pair).

    Raises:
        UserError: broken JSON, or an item that is no conversation (with its number).
    """
    mended: Counter[str] = Counter()
    odd: list[str] = []
    number = 0
    try:
        for number, item in enumerate(_items(path), 1):
            if half_pair(item) is not None:
                odd.append(f"{path.name}, conversation {number}")
                continue
            messages = _mended(_messages(f"{path}, conversation {number}", item), mended)
            if any(message["role"] == "assistant" for message in messages):
                until = caching_field(f"{path}, conversation {number}", item)
                yield Conversation(number, messages, None if until < 0 else until)
            else:
                mended["conversations without an answer were left out"] += 1
    finally:  # also where the reader stops early: close the generator
        if notes is not None:
            notes += left_out(odd)
            notes += [f"{path.name}: {count} {what}." for what, count in sorted(mended.items())]
    if not number:
        raise UserError(f"{path} holds no conversations.")


def _messages(where: str, item: Any) -> list[dict[str, str]]:
    """An item's messages, checked."""
    turns = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(turns, list):
        raise UserError(f'{where}: an object with a list "conversations" is expected: {{"id": "x", "conversations": [...]}}.')
    messages = []
    for place, turn in enumerate(turns):
        speaker = (turn.get("from") or turn.get("role")) if isinstance(turn, dict) else None
        text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise UserError(f'{where}: message {place} must be like {{"from": "human", "value": "Hello"}}, not {json.dumps(turn)[:60]}.')
        if speaker.lower() not in ROLES:
            raise UserError(f"{where}: message {place} is from {speaker!r}; known are {', '.join(ROLES)}.")
        messages.append({"role": ROLES[speaker.lower()], "content": text})
    return messages


def _mended(messages: list[dict[str, str]], mended: Counter[str]) -> list[dict[str, str]]:
    """Messages as templates want them."""
    kept: list[dict[str, str]] = []
    for message in messages:
        if not message["content"].strip():
            mended["empty messages were left out"] += 1
        elif kept and kept[-1]["role"] == message["role"]:
            mended["messages were joined to the one before, of the same role"] += 1
            kept[-1]["content"] += "\n\n" + message["content"]
        elif message["role"] == "assistant" and not any(one["role"] == "user" for one in kept):
            mended["answers that nobody asked for were left out"] += 1
        else:
            kept.append(message)
    return kept


# ------------------------------------------------------------------------- JSON, an item at a time


def _items(path: Path) -> Iterator[Any]:
    """The items of a JSON list, or the objects of JSON lines."""
    if not beginning(path).startswith("["):
        for number, line in numbered_lines(path):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number}: broken JSON ({error}).") from None
        return
    decoder, number, buffer, place = json.JSONDecoder(), 0, "", 0
    with reading(path), open_text(path) as file:
        buffer = file.read(_CHUNK).lstrip()[1:]
        while True:
            match = _SPACE.match(buffer, place)
            place = place if match is None else match.end()
            if buffer.startswith("]", place):
                return
            try:
                item, place = decoder.raw_decode(buffer, place)
            except json.JSONDecodeError as error:
                # An item cut by the end of the buffer fails at that end, or in a string that has none: read on, twice as far each time.
                cut = place >= len(buffer) or error.msg.startswith("Unterminated string") or error.pos >= len(buffer) - 12
                more = file.read(max(_CHUNK, len(buffer) - place)) if cut else ""
                if not more:
                    raise UserError(f"{path}, conversation {number + 1}: broken JSON ({error.msg}).") from None
                buffer, place = buffer[place:] + more, 0
                continue
            number += 1
            yield item


# -------------------------------------------------------------------------------- the workload


class ShareGPTWorkload(Workload):
    """Conversations whose next turn comes `think_s` after the answer to the last. Prompts quote the answers of the file, and each
    request decodes as many tokens as the file's answer has.

    Deviation from a chat: what the model answers is not what the next turn quotes, so blocks of outputs are not hit by later prompts.
    Conversations whose first prompt is too long for the model (or for `max_input`) are left out, later turns end them; both counted.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        folder: str | Path | None = None,
        skip: int = 0,
        limit: int | None = None,
        turns: int | None = None,
        max_input: int | None = None,
        max_output: int | None = None,
        arrivals: Mapping[str, Any] | None = None,
        think_s: object = 0.0,
        ignore_eos: bool = True,
        sampling: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        abort: Mapping[str, Any] | None = None,
    ) -> None:
        """path: a file, or a name that `find_trace` knows, looked for in `folder` first. skip, limit: conversations. turns: at most so
        many requests of a conversation. max_input, max_output: tokens. arrivals: of conversations. think_s: see `Numbers`."""
        super().__init__(concurrency=concurrency, abort=abort)
        self._path, self._folder = path, folder
        self._skip = whole("workload.skip", skip, 0)
        self._limit = None if limit is None else whole("workload.limit", limit, 1)
        self._max_turns = None if turns is None else whole("workload.turns", turns, 1)
        self._max_input = None if max_input is None else whole("workload.max_input", max_input, 1)
        self._max_output = None if max_output is None else whole("workload.max_output", max_output, 1)
        self._arrivals, self._think_s = arrivals, think_s
        self._sampling = LengthSampling(sampling, ignore_eos)

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Read the conversations, and choose those whose first prompt fits."""
        self._ctx = ctx
        path = find_trace(self._path, trace_folders(self._folder))
        room = min(ctx.max_model_len - 1, self._max_input or ctx.max_model_len)
        self._chosen: list[Conversation] = []
        num_too_long = 0
        with closing(read_sharegpt(path, self.notes)) as conversations:
            for place, conversation in enumerate(conversations):
                if self._limit is not None and len(self._chosen) >= self._limit:
                    break
                if place < self._skip:
                    continue
                if len(conversation.prompt(conversation.answers[0], ctx.tokenizer, ctx.vocab_size)) <= room:
                    self._chosen.append(conversation)
                else:
                    num_too_long += 1
        if not self._chosen:
            raise UserError(f"{path}: no conversation is left: {num_too_long} have a first prompt of more than {room} tokens"
                            f" (max_model_len, workload.max_input), workload.skip={self._skip} leaves out others.")  # fmt: skip
        if ctx.tokenizer is None:
            self.notes.append("This run has no tokenizer: the prompts are the UTF-8 bytes of their texts.")
        if num_too_long:
            self.notes.append(f"{path.name}: {num_too_long} conversations begin with more than {room} tokens and were left out.")
        self._room, self.num_early_ends = room, 0
        self._num_requests = sum(len(self._answers(index)) for index in range(len(self._chosen)))
        total = len(self._chosen)
        self._pauses = Numbers("workload.think_s", self._think_s, self.notes)
        self._sampling.params(1)
        arrivals_s: list[float] = Arrivals("workload.arrivals", self._arrivals, self.notes).draw(
            rng.generator(ctx.seed, rng.ARRIVALS), total
        ).tolist()  # fmt: skip
        return arrivals_s

    def _answers(self, index: int) -> list[int]:
        return self._chosen[index].answers[: self._max_turns]

    def make(self, index: int) -> Request:
        """The first turn of conversation `index` of those chosen."""
        request = self._turn(index, 0)
        assert request is not None, "chosen conversations begin with a prompt that fits"
        return request

    def _turn(self, index: int, turn: int) -> Request | None:
        """A turn's request; None where its prompt is too long."""
        conversation, ctx = self._chosen[index], self._ctx
        place = self._answers(index)[turn]
        prompt = conversation.prompt(place, ctx.tokenizer, ctx.vocab_size)
        if len(prompt) > self._room:
            return None
        output_len = len(conversation.answer(place, ctx.tokenizer, ctx.vocab_size))
        if self._max_output is not None:
            output_len = min(output_len, self._max_output)
        return Request(
            request_id=f"sharegpt-{conversation.number}-turn-{turn}",
            prompt_token_ids=prompt,
            sampling=self._sampling.params(output_len),
            prompt=conversation.messages[place - 1]["content"],
            oracle_output_len=min(output_len, ctx.max_model_len - len(prompt)),
            session_id=f"sharegpt-{index}",
            turn=turn,
            cache_until=conversation.cache_until,
        )

    def has_next(self, request: Request) -> bool:
        """Whether the conversation has further turns."""
        return request.turn + 1 < len(self._answers(_index(request)))

    def follow_up(self, request: Request, record: RequestRecord) -> Request | None:
        """The next turn, `think_s` after the finish; None after an abort or a refusal, or where it is too long."""
        index, turn = _index(request), request.turn + 1
        following = self._turn(index, turn) if record.finish_reason in ANSWERED else None
        if following is None:
            self._ended_early(len(self._answers(index)) - turn)
            return None
        pause = self._pauses.reals(rng.generator(self._ctx.seed, rng.THINK, index, turn), 1)
        following.arrival_s = record.finish_s + float(pause[0])
        return following

    def _ended_early(self, num_turns_lost: int) -> None:
        """Count it, and keep one note that says how many there are."""
        self._num_requests -= num_turns_lost
        self.num_early_ends += 1
        if self.num_early_ends == 1:
            self._note_at = len(self.notes)
            self.notes.append("")
        count = f"{self.num_early_ends} of {len(self._chosen)} conversations"
        self.notes[self._note_at] = f"{count} ended early: a turn was not answered, or the next prompt was longer than {self._room} tokens."

    @property
    def num_requests(self) -> int | None:
        """Turns of all conversations, less those that early ends have cost."""
        return self._num_requests if self._loop is not None else None


def _index(request: Request) -> int:
    """The number of a request's conversation among those chosen."""
    return int((request.session_id or "").removeprefix("sharegpt-"))
