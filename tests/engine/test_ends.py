"""Whatever ends a sequence, a stream says what `generate` says, at both depths; and no scene leaves a block held. See `ends_fuzz`."""

from __future__ import annotations

from collections import Counter

import pytest
from ends_fuzz import ends_of, ends_of_chunks, llm_of, run
from engine_support import policies

from kvlab.generation import Chunk
from kvlab.types import SamplingParams

NUM_SCENES = 12
PROMPT = [5, 6, 7]
WANTED = {"depth 0", "depth 1", "requests aborted", "made to give way", "ended by length", "ended by stop (id)", "ended by stop (string)"}


@pytest.mark.parametrize("first", [0, 300])
def test_random_scenes(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + NUM_SCENES):
        run(seed, counts)
    assert not [what for what in WANTED if not counts[what]], counts


@pytest.mark.full
def test_many_random_scenes() -> None:
    counts: Counter[str] = Counter()
    for seed in range(10_000, 10_800):
        run(seed, counts)
    wanted = WANTED | {"ended by kv_capacity (n > 1)", "ended by abort", "ended by length (beam)", "swaps of the last call", "ring, none"}
    assert not [what for what in wanted if not counts[what]], counts


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_id_that_ends_a_sequence_is_in_the_ids_and_no_part_of_the_text(depth: int, is_kept: bool) -> None:
    llm = llm_of(policies(), depth, num_blocks=40, block_size=4, max_model_len=64)
    assert llm.tokenizer is not None
    ids = llm.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    at = next(i for i in range(3, 12) if ids[i] < 128 and ids[i] not in ids[:i])  # an ASCII character
    chunks: list[Chunk] = []
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=ids[at : at + 1], include_stop_str=is_kept)
    output = llm.generate(PROMPT, sampling, on_chunk=chunks.append)[0]
    text = llm.tokenizer.decode(ids[: at + is_kept])
    assert (output.token_ids, output.text, output.finish_reason) == (ids[: at + 1], text, "stop")
    assert ends_of_chunks(chunks, 1) == ends_of_chunks(llm.stream(PROMPT, sampling), 1) == ends_of([output])
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * (at + 1)
