"""Random scenes of `kvlab.LLM`: every layout, prefix cache and way to give way, at both depths, and every way in which a sequence can end.

Each scene is served three times by one `LLM` over the paged fake model: as a stream, by `generate` with `on_chunk`, and by plain
`generate`. All must tell the same ids, texts and reasons, equal to those of an undisturbed engine at depth 0; no placeholder (an id below
0) is ever handed out, and no block is held between two calls. Tokens of the fake model are random bytes, so texts hold characters that
are cut, and bytes that are no UTF-8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from random import Random
from typing import Any, NamedTuple

from engine_support import Forcer, policies, prompt_of
from equality_support import tiny

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import VirtualClock
from kvlab.generation import Chunk, GenerationOutput
from kvlab.llm import LLM
from kvlab.policies.prefix_cache import NoCache
from kvlab.testing.invariants import check_drained, check_invariants
from kvlab.testing.late import LateRunner
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import RequestTooLong, SamplingParams

VOCAB, EOS = 320, (257, 5)
LAYOUTS = ("paged", "paged", "paged", "contiguous_max", "contiguous_pow2", "ring")
ENDS = ("length", "first token", "eos", "stop id", "stop id kept", "stop string", "stop string kept", "abort", "beams")

Ends = tuple[tuple[tuple[int, ...], str, str], ...]
"""(ids, text, reason) of each completion."""


class Scene(NamedTuple):
    """How a scene is made."""

    depth: int
    layout: str
    prefix_cache: str
    mode: str
    num_blocks: int
    block_size: int
    num_cpu_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    batching: str


def scene_of(draw: Random) -> Scene:
    """A random one."""
    layout = draw.choice(LAYOUTS)
    block_size = draw.choice((1, 3, 4, 16))
    length = draw.choice((24, 40))
    region = 1 << (-(-length // block_size) - 1).bit_length()
    num_blocks = region * draw.choice((4, 5, 9)) if layout != "paged" else max(4, draw.choice((40, 70, 130)) // block_size)
    return Scene(draw.randrange(2), layout, draw.choice(("none", "hash", "radix")) if layout == "paged" else "none",
                 draw.choice(("recompute", "swap")), num_blocks, block_size, draw.choice((0, num_blocks // 2, 2 * num_blocks)), length,
                 draw.choice((9, 16, 64)), draw.choice(("chunked", "prefill_first", "decode_first", "walkthrough")))  # fmt: skip


def llm_of(policy_set: PolicySet, depth: int = 0, **limits: Any) -> LLM:
    """An `LLM` whose engine computes with the fake model."""
    llm = LLM(tiny(), num_blocks=4, prefix_cache="none")
    runner = LateRunner(PagedFakeRunner(VOCAB)) if depth else PagedFakeRunner(VOCAB)
    llm.engine = Engine(EngineConfig(depth=depth, **limits), policy_set, runner, VirtualClock(), llm.tokenizer, EOS, vocab_size=VOCAB)
    return llm


@cache
def plain_llm() -> LLM:
    """Room for everyone, nothing cached."""
    return llm_of(policies(prefix_cache=NoCache()), num_blocks=200, block_size=16, max_model_len=256)


def ends_of(outputs: Iterable[GenerationOutput]) -> list[Ends]:
    """What `generate` says."""
    return [tuple((one.token_ids, one.text, one.finish_reason) for one in output.outputs) for output in outputs]


def ends_of_chunks(chunks: Iterable[Chunk], num_prompts: int) -> list[Ends]:
    """What a stream says, put together. Each completion's last chunk, and no other, has its reason."""
    found: dict[tuple[int, int], tuple[tuple[int, ...], str, str]] = {}
    for chunk in chunks:
        at = chunk.prompt_index, chunk.index
        ids, text, reason = found.get(at, ((), "", ""))
        assert not reason, f"a chunk of completion {at} after its last"
        assert min(chunk.token_ids, default=0) >= 0, f"{chunk} holds a placeholder"
        found[at] = (*ids, *chunk.token_ids), text + chunk.text, chunk.finish_reason
    return [tuple(found[at] for at in sorted(found) if at[0] == number) for number in range(num_prompts)]


def sampling_of(end: str, plain: Ends, draw: Random) -> dict[str, Any]:
    """Parameters by which a request that would have said `plain` ends so, and may do so at several places."""
    ids, text, _ = draw.choice(plain)
    at = draw.randrange(len(ids))
    match end:
        case "first token":
            return {"stop_token_ids": tuple(one[0][0] for one in plain)} if draw.random() < 0.5 else {"max_tokens": 1}
        case "eos":
            return {"ignore_eos": False}
        case "stop id" | "stop id kept":
            least = draw.choice((0, 0, min(at + 1, 6)))
            return {"stop_token_ids": (ids[at],), "include_stop_str": end.endswith("kept"), "min_tokens": least}
        case "stop string" | "stop string kept" if text:
            first = draw.randrange(len(text))
            stop = (text[first : first + draw.choice((1, 2, 3))], "never met")
            return {"stop": stop, "include_stop_str": end.endswith("kept"), "min_tokens": draw.choice((0, 0, 3))}
    return {}


def requests_of(draw: Random, scene: Scene) -> tuple[list[list[int]], list[SamplingParams], list[str]]:
    """Prompts (some begin alike), their parameters, and how they are to end."""
    prompts, samplings, ends = [], [], []
    shared = prompt_of(10, draw.randrange(3), VOCAB)
    for _ in range(draw.choice((1, 2, 4))):
        prompt = shared[: draw.randrange(11)] + prompt_of(draw.randrange(1, 8), draw.randrange(1000), VOCAB)
        end = draw.choice(ENDS)
        most = scene.max_model_len - len(prompt)
        params: dict[str, Any] = {"max_tokens": min(most, draw.choice((1, 2, 5, 12, most))), "ignore_eos": True}
        if end == "beams":
            params |= {"beam_width": draw.choice((2, 3)), "n": draw.choice((1, 2)), "max_tokens": min(6, params["max_tokens"])}
        else:
            params |= {"n": draw.choice((1, 1, 2, 3)), "temperature": draw.choice((0.0, 1.0)), "seed": draw.randrange(100)}
            plain = ends_of(plain_llm().generate(prompt, SamplingParams(**params)))[0]
            params |= sampling_of(end, plain, draw)
            params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        prompts.append(prompt)
        samplings.append(SamplingParams(**params))
        ends.append(end)
    return prompts, samplings, ends


class Mischief:
    """What happens to a call while it runs: some of its requests are aborted, some are made to give way."""

    def __init__(self, llm: LLM, ends: list[str], draw: Random) -> None:
        self.llm, self.ends, self.draw = llm, ends, draw
        self.forcer = Forcer(llm.engine)
        self.num_aborted = 0

    def happens(self) -> None:
        """Between two chunks."""
        check_invariants(self.llm.engine)
        for one in list(self.llm._live.values()):
            if self.ends[one.number] == "abort" and self.draw.random() < 0.2:
                self.num_aborted += self.llm.engine.abort(one.request.request_id) is not None
            elif self.draw.random() < 0.03:
                self.forcer.after.append(one.request.request_id)


def run(seed: int, counts: Counter[str]) -> None:
    """One scene. AssertionError: what differs."""
    draw = Random(seed)
    scene = scene_of(draw)
    prompts, samplings, ends = requests_of(draw, scene)
    wanted = ends_of(plain_llm().generate(prompts, samplings))
    made = policies(layout=scene.layout, prefix_cache=scene.prefix_cache, mode=scene.mode, batching=scene.batching)
    llm = llm_of(made, **{k: v for k, v in scene._asdict().items() if k not in ("layout", "prefix_cache", "mode", "batching")})
    try:
        for prompt, sampling in zip(prompts, samplings, strict=True):
            llm.stream(prompt, sampling)  # checks at once
    except RequestTooLong:
        counts["too long for the pool"] += 1
        return
    mischief = Mischief(llm, ends, draw)
    chunks: list[Chunk] = []

    def hear(chunk: Chunk) -> None:
        chunks.append(chunk)
        mischief.happens()

    for chunk in llm.stream(prompts, samplings):
        hear(chunk)
    check_drained(llm.engine)
    compare(ends_of_chunks(chunks, len(prompts)), wanted, samplings, f"seed {seed}, stream")
    chunks.clear()
    outputs = llm.generate(prompts, samplings, on_chunk=hear)
    check_drained(llm.engine)
    told = ends_of(outputs)
    assert ends_of_chunks(chunks, len(prompts)) == told, f"seed {seed}: on_chunk and generate differ"
    compare(told, wanted, samplings, f"seed {seed}, on_chunk")
    outputs = llm.generate(prompts, samplings)
    check_drained(llm.engine)
    compare(ends_of(outputs), wanted, samplings, f"seed {seed}, generate")
    _leave_early(llm, prompts, samplings, draw)
    count(scene, outputs, told, samplings, mischief, counts)


def _leave_early(llm: LLM, prompts: list[list[int]], samplings: list[SamplingParams], draw: Random) -> None:
    stream = llm.stream(prompts, samplings)
    for _, _ in zip(range(draw.randrange(6)), stream, strict=False):
        pass
    stream.close()  # type: ignore[attr-defined]
    check_drained(llm.engine)


def compare(found: list[Ends], wanted: list[Ends], samplings: list[SamplingParams], where: str) -> None:
    """Equal; what was cut short begins alike."""
    for number, (mine, theirs, sampling) in enumerate(zip(found, wanted, samplings, strict=True)):
        if any(reason in ("abort", "kv_capacity") for _, _, reason in mine):
            for (ids, text, _), (all_ids, all_text, _) in zip(mine, theirs, strict=False):
                if not sampling.beam_width:
                    assert all_ids[: len(ids)] == ids, f"{where}, prompt {number}: {ids} does not begin {all_ids}"
                    assert all_text.startswith(text.rstrip("\ufffd")) or sampling.stop, f"{where}, prompt {number}: {text!r}, {all_text!r}"
        else:
            assert mine == theirs, f"{where}, prompt {number} ({sampling}): {mine} instead of {theirs}"


def count(scene: Scene, outputs: list[GenerationOutput], told: list[Ends], samplings: list[SamplingParams], mischief: Mischief,
          counts: Counter[str]) -> None:  # fmt: skip
    """What took place, so that a run can say that all did."""
    engine = mischief.llm.engine
    counts["scenes"] += 1
    counts[f"depth {scene.depth}"] += 1
    counts[f"{scene.layout}, {scene.prefix_cache}"] += 1
    counts["requests aborted"] += mischief.num_aborted
    counts["made to give way"] += mischief.forcer.num_forced
    counts["preemptions of the last call"] += sum(output.record.num_preemptions for output in outputs)
    counts["swaps of the last call"] += sum(output.record.num_swaps for output in outputs)
    counts["blocks evicted"] += engine.kv.pool.num_evicted
    counts["sequences"] += sum(map(len, told))
    for ends, sampling in zip(told, samplings, strict=True):
        asked = " (beam)" if sampling.beam_width else " (string)" if sampling.stop else ""
        for _, _, reason in ends:
            how = asked or (" (id)" if reason == "stop" else " (n > 1)" if sampling.n > 1 else "")
            counts[f"ended by {reason}{how}"] += 1
