"""Tokens for people who just want tokens: `kvlab.LLM().generate(["The capital of France is"])`. Needs no Hydra.

One engine lives as long as the object, so prefixes of earlier calls are found in the cache. Ctrl-C ends a call between two steps.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlab.assembly import engine_config, make_engine, parts_of, policy_objects
from kvlab.config import check_value
from kvlab.effects import no_token_limit
from kvlab.engine.config import PolicySet
from kvlab.engine.engine import Engine
from kvlab.generation import Chunk, ChunkStream, GenerationOutput, LiveRequest
from kvlab.interrupts import interrupts_held
from kvlab.model.loading import LoadedModel, ModelSpec, load_model
from kvlab.model.random_weights import SHAPES
from kvlab.model.specs import dummy, hf, smollm2, tiny
from kvlab.model.tokenizer import Tokenizer, dated
from kvlab.policies.admission.watermark import Watermark
from kvlab.policies.block_sizing.fixed import Fixed
from kvlab.progress import Progress
from kvlab.prompts import as_prompts, one_each
from kvlab.types import Listener, Request, RequestRecord, SamplingParams, UserError, unknown_name
from kvlab.types.chat import CHAT_DATE, Message, as_messages
from kvlab.types.homes import expanded

_log = logging.getLogger("kvlab.llm")

MAX_NUM_BATCHED_TOKENS = 2048
"""Tokens a step may compute, unless given."""

CPU_KV_TOKENS = 16_384
"""Tokens of the KV pool on a CPU, unless a size is given."""

Prompts = str | Iterable[str] | Iterable[int] | Iterable[str | Iterable[int]]


class LLM:
    """A model and an engine.

    Threads: several may call it at once. A step serves all of them, one thread at a time steps, and each gets its own answers.

    Args:
        model: "smollm2" (bundled), "tiny", "dummy_llama3_8b" and other shapes, a folder, a Hugging Face id, a spec or a loaded model.
        dtype, device: as on the command line. block_size: tokens a block. num_blocks, kv_cache_tokens: size of the KV pool; neither:
            `CPU_KV_TOKENS` on a CPU, what `gpu_memory_utilization` leaves on CUDA. num_cpu_blocks: swap space.
        max_num_seqs, max_num_batched_tokens, max_model_len: limits of the engine. watermark: share of the pool kept free at admission.
        depth: 1 plans a step while the one before runs.
        chat_date: today (YYYY-MM-DD), as chat templates that write the date see it.
        seed: randomness of requests without a seed of their own. listeners: hear the engine (a `kvlab.trace.Recorder`, for one).
        policies: by seam, an object, a class or a name: `eviction="lfu"`.

    Raises:
        UserError: a wrong name or value, a model that can't be loaded, a combination that can't work.
    """

    def __init__(
        self,
        model: str | Path | ModelSpec | LoadedModel = "smollm2",
        *,
        dtype: str = "auto",
        device: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        num_cpu_blocks: int = 0,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        max_model_len: int | None = None,
        watermark: float = 0.01,
        depth: int = 0,
        seed: int = 0,
        chat_date: str = CHAT_DATE,
        listeners: Sequence[Listener] = (),
        **policies: Any,
    ) -> None:
        config = {
            "block_size": block_size, "num_blocks": num_blocks, "kv_cache_tokens": kv_cache_tokens,
            "gpu_memory_utilization": gpu_memory_utilization, "memory_fraction": 0.5, "num_cpu_blocks": num_cpu_blocks,
            "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len, "watermark": watermark, "depth": depth, "seed": seed, "dtype": dtype, "device": device,
            "chat_date": chat_date,
        }  # fmt: skip
        for key, value in config.items():
            check_value(key, value)
        chosen = {"admission": Watermark(watermark), "block_sizing": Fixed(block_size)} | policy_objects(policies)
        self.policies = PolicySet(**chosen)
        for note in no_token_limit(max_num_batched_tokens, self.policies) if max_num_batched_tokens != MAX_NUM_BATCHED_TOKENS else ():
            _log.warning("%s", note)
        self.loaded = model if isinstance(model, LoadedModel) else load_model(_spec(model), dtype, device)
        self._tokenizer = dated(self.loaded.tokenizer, chat_date)
        parts = parts_of(self.loaded)
        if num_blocks is None and kv_cache_tokens is None and self.loaded.model.device.type == "cpu":
            config["kv_cache_tokens"] = CPU_KV_TOKENS
        self.engine: Engine = make_engine(engine_config(config, self.policies, parts), self.policies, parts, listeners)
        self._ids = itertools.count()
        self._live: dict[str, LiveRequest] = {}  # in the engine, by request_id
        self._left: deque[LiveRequest] = deque()  # to be aborted at the end of a turn
        self._is_busy = False  # in the middle of a turn
        self._is_whole = True  # no step has failed half-way

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where it has none (then prompts are token ids)."""
        return self._tokenizer

    # ------------------------------------------------------------------- generating

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: bool | Sequence[bool] = True,
        cache_until: int | Sequence[int | None] | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        progress: bool = False,
    ) -> list[GenerationOutput]:
        """Complete prompts; one output a prompt, in their order.

        Args:
            prompts: a text, a prompt's token ids (a list, 1-d array or tensor of whole numbers), or several of either.
            sampling: for all prompts, or one each; default: greedy, 16 tokens.
            cache, cache_until: False keeps a prompt and its answer out of the prefix cache, a position (in tokens) what comes from there
                on; for all prompts, or one each (see `kvlab.types.Request`). on_chunk: called with tokens as they come.
            progress: show a bar.

        Raises:
            UserError: an empty prompt, one that can never fit, text without a tokenizer, another number of sampling parameters
                than of prompts. Nothing was started then.
        """
        requests, live = self._requests(prompts, sampling, cache, cache_until), list[LiveRequest]()
        with (
            Progress(len(requests), "generate", "req", progress) as bar,
            closing(self._steps(requests, live, streaming=on_chunk is not None)) as chunks,
        ):
            for chunk in chunks:
                if on_chunk is not None:
                    on_chunk(chunk)
                bar.update(sum(one.record is not None for one in live))
        return [one.output() for one in live]

    def stream(self, prompts: Prompts, sampling: SamplingParams | Sequence[SamplingParams] | None = None, *,
               cache: bool | Sequence[bool] = True, cache_until: int | Sequence[int | None] | None = None) -> ChunkStream:  # fmt: skip
        """Complete prompts and yield tokens as they come. Prompts are checked at once and start with the first chunk that is asked for;
        leaving the loop early aborts what still runs (or `close()`). Several streams may go on side by side, in one batch."""
        return ChunkStream(self._steps(self._requests(prompts, sampling, cache, cache_until), [], streaming=True))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: bool | Sequence[bool] = True,
        cache_until: int | Sequence[int | None] | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        progress: bool = False,
    ) -> list[GenerationOutput]:
        """Answer a conversation (`[{"role": "user", "content": "Hello"}]`), or several. Arguments as in `generate`.

        Raises:
            UserError: as `generate`; messages that are none (see `kvlab.types.chat`); a model without chat template, or whose
                template refuses them.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
            as_messages(messages)  # says what is wrong
        conversations: Sequence[Any] = messages if isinstance(messages[0], (list, tuple)) else [messages]
        checked = [as_messages(one, f"Conversation {i}" if len(conversations) > 1 else "") for i, one in enumerate(conversations)]
        tokenizer = self._need_tokenizer("a conversation")
        with self._turn():  # (tokenizers are no more used from two threads at once than engines)
            ids = [tokenizer.apply_chat(conversation) for conversation in checked]  # type: ignore[arg-type]
        return self.generate(ids, sampling, cache=cache, cache_until=cache_until, on_chunk=on_chunk, progress=progress)

    # --------------------------------------------------------------------- requests

    def _requests(self, prompts: Prompts, sampling: SamplingParams | Sequence[SamplingParams] | None, cache: Any,
                  cache_until: Any) -> list[Request]:  # fmt: skip
        with self._turn():
            return self._checked_requests(prompts, sampling, cache, cache_until)

    def _checked_requests(self, prompts: Prompts, sampling: SamplingParams | Sequence[SamplingParams] | None, cache: Any,
                          cache_until: Any) -> list[Request]:  # fmt: skip
        texts = as_prompts(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            each = [sampling or SamplingParams()] * len(texts)
        elif isinstance(sampling, (str, bytes, Mapping)) or not isinstance(sampling, Iterable):
            raise UserError(f"sampling is {sampling!r:.60}: a kvlab.SamplingParams is needed, or one for each prompt.")
        else:
            each = list(sampling)
        if len(each) != len(texts):
            raise UserError(f"{len(each)} sampling parameters for {len(texts)} prompts: give one for all, or one for each.")
        for params in each:
            if not isinstance(params, SamplingParams):
                raise UserError(f"sampling holds {params!r}: a kvlab.SamplingParams is needed, or one for each prompt.")
        now_s = self.engine.clock.now()
        requests = []
        caching = zip(one_each("cache", cache, len(texts)), one_each("cache_until", cache_until, len(texts)), strict=True)
        for prompt, params, (caches, until) in zip(texts, each, caching, strict=True):
            text = prompt if isinstance(prompt, str) else None
            ids = self._need_tokenizer("a text").encode(prompt) if isinstance(prompt, str) else prompt
            requests.append(Request(f"llm-{next(self._ids)}", ids, params, text, now_s, cache=caches, cache_until=until))
        for request in requests:
            self.engine.check_request(request)
        return requests

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"Model {self.loaded.name!r} has no tokenizer, so it can't read {what}: give token ids.")
        return self.tokenizer

    # ------------------------------------------------------------------------ turns

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """In here the engine is this thread's alone, and Ctrl-C waits. UserError: a listener or policy called, from within a step."""
        with interrupts_held(), self.engine.turn.take("kvlab.LLM"):
            if self._is_busy:
                raise UserError("kvlab.LLM was called within a step of its own engine, by a listener or a policy. Call it from on_chunk, "
                                "or when the call has returned.")  # fmt: skip
            self._is_busy = True
            try:
                try:
                    yield
                finally:
                    self._abort_left()
                while self._is_whole and self.engine.has_work and not self.engine.groups:
                    self._step()  # with nobody left, take in what is in flight (depth 1): between two calls nothing holds a block
            finally:
                self._is_busy = False
        time.sleep(0)  # another thread's turn, if one waits

    def _steps(self, requests: list[Request], live: list[LiveRequest], streaming: bool) -> Generator[Chunk, None, None]:
        """Start `requests`, all or none, and step until they have ended. Fills `live`. Yields chunks: every token when streaming, else the
        last one of each prompt.

        Others may step the same engine between two chunks (a second stream, `generate` within a loop over one, another thread): whoever
        steps says what ended to whom it concerns.
        """
        try:
            with self._turn():
                self._start(requests, live)
            open_ones = list(live)
            while open_ones:
                with self._turn():
                    if all(one.record is None for one in open_ones):
                        self._step()
                    chunks = [chunk for one in open_ones for chunk in (one.chunks() if streaming else one.last_chunk())]
                    open_ones = [one for one in open_ones if one.record is None]
                yield from chunks
        finally:
            self._leave([one for one in live if one.record is None])

    def _start(self, requests: list[Request], live: list[LiveRequest]) -> None:
        now_s = self.engine.clock.now()
        for number, request in enumerate(requests):
            self.engine.add_request(replace(request, arrival_s=now_s))
            one = LiveRequest(number, request, self.engine.groups[request.request_id], self.tokenizer)
            live.append(one)
            self._live[request.request_id] = one

    def _step(self) -> None:
        engine = self.engine
        if not engine.has_work and not engine.has_ended:
            raise RuntimeError(f"{', '.join(self._live)}: no longer in the engine. Was it taken out by hand?")
        self._is_whole = False
        self._hand_out(engine.step().finished if engine.has_work else engine.take_ended())
        self._is_whole = True

    def _hand_out(self, ended: Iterable[RequestRecord]) -> None:
        for record in ended:
            one = self._live.pop(record.request_id, None)
            if one is not None:
                one.record = record

    def _leave(self, live: list[LiveRequest]) -> None:
        """Nobody wants these any more. Where the garbage collector closes a stream in the middle of a turn of this thread, they are
        aborted at its end."""
        self._left.extend(live)
        with self.engine.turn.lock:
            if live and not self._is_busy and not self.engine.turn.within:
                with self._turn():
                    pass

    def _abort_left(self) -> None:
        while self._left:
            self.engine.abort(self._left.popleft().request.request_id)
            self._hand_out(self.engine.take_ended())


def _spec(model: str | Path | ModelSpec) -> ModelSpec:
    """The spec of a model's name, folder or hub id."""
    if not isinstance(model, (str, Path)):
        if callable(getattr(model, "load", None)):
            return model
        raise UserError(f"model = {model!r:.60} is not allowed: a model's name, a folder, a Hugging Face id OWNER/NAME, a spec of "
                        "kvlab.model.specs or a loaded model.")  # fmt: skip
    name = str(model)
    if not name.strip():
        raise UserError("model is empty: a model's name, a folder or a Hugging Face id OWNER/NAME is needed.")
    if name == "smollm2":
        return smollm2()
    if name == "tiny":
        return tiny()
    if name.removeprefix("dummy_") in SHAPES and name.startswith("dummy_"):
        return dummy(name.removeprefix("dummy_"))
    if isinstance(model, Path) or expanded(name).is_dir():
        return hf(path=name)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return hf(id=name)
    raise unknown_name("model", name, ["smollm2", "tiny", *(f"dummy_{shape}" for shape in SHAPES), "a folder", "an id OWNER/NAME"])

