"""What becomes of a prompt, as a whole or in chunks, and the request in the engine that it is read from."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from kvlab.engine.detokenizer import Detokenizer
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.engine.turn import DECIDING, Turn
from kvlab.model.tokenizer import Tokenizer
from kvlab.types import Request, RequestRecord, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Completion:
    """One output of a prompt. `index`: 0 to n - 1 (beams: best first). `logprobs`: one entry a token, where they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What became of one prompt.

    Attributes:
        prompt: the text it came from, where there is one. outputs: n completions. record: times, cached tokens, preemptions.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    record: RequestRecord

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first completion ended: "stop", "length" ..."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one completion, as they come. `prompt_index`: which prompt; `index`: which of its n completions.

    `text`: what is certain by now: characters cut between tokens and possible beginnings of stop strings come later.
    `finish_reason`: "" until the last chunk. Beam searches give one chunk a beam, at their end.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


class ChunkStream(Iterator[Chunk]):
    """Chunks as they come. `close()`, or letting go of it, aborts what still runs. Several threads may read one; each chunk goes to one."""

    def __init__(self, chunks: Generator[Chunk, None, None]) -> None:
        self._chunks = chunks
        self._turn = Turn()

    def __next__(self) -> Chunk:
        with self._turn.take("A stream of kvlab.LLM", DECIDING):
            return next(self._chunks)

    def close(self) -> None:
        """No more chunks are wanted."""
        with self._turn.take("close() of a stream", DECIDING):
            self._chunks.close()


class LiveRequest:
    """A request in the engine, and how much of it has been streamed."""

    def __init__(self, number: int, request: Request, group: SequenceGroup, tokenizer: Tokenizer | None) -> None:
        self.number = number
        self.request = request
        self.group = group
        self.record: RequestRecord | None = None
        self._tokenizer = tokenizer
        self._sent: dict[int, int] = {}
        self._texts: dict[int, Detokenizer] = {}
        self._closed: set[int] = set()

    def chunks(self) -> Iterator[Chunk]:
        """What is new since the last call."""
        if self.request.sampling.beam_width:
            if self.record is not None:
                for index, ((ids, reason), text) in enumerate(zip(self.record.outputs, self._final_texts(), strict=True)):
                    yield Chunk(self.number, index, text, ids, reason)
            return
        for seq in sorted([*self.group.seqs, *self.group.ended_seqs], key=lambda s: s.stream):
            if seq.stream in self._closed:
                continue
            sent = self._sent.get(seq.stream, 0)
            ids, reason = seq.output_token_ids[sent:], seq.finish_reason
            self._sent[seq.stream] = sent + len(ids)
            if reason:
                self._closed.add(seq.stream)
            if ids or reason:
                yield Chunk(self.number, seq.stream, self._new_text(seq, sent), ids, reason)

    def last_chunk(self) -> Iterator[Chunk]:
        """For who does not stream: one chunk without text, once the request has ended."""
        if self.record is not None:
            yield Chunk(self.number, 0, "", (), self.record.finish_reason)

    def _new_text(self, seq: Sequence, num_sent: int) -> str:
        """Text of the tokens behind the first `num_sent`."""
        if seq.stop_checker is not None:
            return seq.stop_checker.take() + (seq.stop_checker.take_rest() if seq.finish_reason else "")
        if self._tokenizer is None:
            return ""
        text = self._texts.setdefault(seq.stream, Detokenizer(self._tokenizer))
        return "".join(map(text.append, seq.text_token_ids[num_sent:])) + (text.flush() if seq.finish_reason else "")

    def _final_texts(self) -> tuple[str, ...]:
        assert self.record is not None
        return self.record.texts or ("",) * len(self.record.outputs)

    def output(self) -> GenerationOutput:
        """The finished request."""
        assert self.record is not None
        seqs = sorted(self.group.ended_seqs, key=lambda s: s.stream)
        outputs = tuple(
            Completion(i, text, ids, reason, tuple(seq.logprobs))
            for i, ((ids, reason), text, seq) in enumerate(zip(self.record.outputs, self._final_texts(), seqs, strict=True))
        )
        return GenerationOutput(self.request.prompt, tuple(self.request.prompt_token_ids), outputs, self.record)
