"""How large the checks are: as the goals state them on a GPU, tiny on a CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all sections.

    Attributes:
        copy_bytes, matrix_size, num_repeats: the card's own rates, and repeats of every timing.
        heads: (query heads, KV heads, head size) of the timed kernels.
        decode_seqs, decode_len: sequences and their slots; prefill_len: tokens of one prompt.
        block_sizes: of the curve. grid_*: the correctness grid (lengths are those of one ragged batch).
        model, num_seqs, num_prompt, num_output: end to end; their_batches: rows of transformers' batches. curve_seqs, curve_output: of the
            same prompts, end to end over block sizes.
        num_prompts, prompt_len, num_new: prompts whose tokens are compared.
    """

    copy_bytes: int
    matrix_size: int
    num_repeats: int
    heads: tuple[int, int, int]
    decode_seqs: int
    decode_len: int
    prefill_len: int
    block_sizes: tuple[int, ...]
    grid_head_dims: tuple[int, ...]
    grid_group_sizes: tuple[int, ...]
    grid_block_sizes: tuple[int, ...]
    grid_lengths: tuple[int, ...]
    model: str
    num_layers: int | None
    num_seqs: int
    num_prompt: int
    num_output: int
    curve_seqs: int
    curve_output: int
    their_batches: tuple[int, ...]
    num_prompts: int
    prompt_len: int
    num_new: int


FULL = Sizes(
    copy_bytes=2 << 30, matrix_size=8192, num_repeats=30, heads=(32, 8, 128), decode_seqs=64, decode_len=8192, prefill_len=8192,
    block_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256), grid_head_dims=(64, 80, 96, 128, 256), grid_group_sizes=(1, 3, 5, 8, 32),
    grid_block_sizes=(1, 3, 8, 16, 17, 32, 256, 544), grid_lengths=(1, 2, 15, 16, 17, 63, 64, 65, 300, 1025),
    model="llama3_8b", num_layers=None, num_seqs=256, num_prompt=1024, num_output=256, curve_seqs=64,
    curve_output=64, their_batches=(32, 64, 128, 256),
    num_prompts=16, prompt_len=96, num_new=32,
)  # fmt: skip

DRY = Sizes(
    copy_bytes=1 << 20, matrix_size=64, num_repeats=2, heads=(4, 2, 64), decode_seqs=2, decode_len=40, prefill_len=24,
    block_sizes=(1, 16), grid_head_dims=(64,), grid_group_sizes=(3,), grid_block_sizes=(3, 16), grid_lengths=(1, 17),
    model="tiny", num_layers=None, num_seqs=2, num_prompt=6, num_output=3, curve_seqs=2,
    curve_output=2, their_batches=(2,),
    num_prompts=2, prompt_len=9, num_new=4,
)  # fmt: skip
