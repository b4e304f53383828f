"""llama.cpp's unified buffer of cells, and its server's slots."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import FreeView, SlotLayout, SlotView, is_number, require

MAX_SLOTS = 65_536


class Ring(SlotLayout):
    """One buffer, searched for consecutive free cells from a head that goes round; slots keep the last sequence they served.

    A step's new cells of a sequence are a run of free ones, sought from the head on and then from the start; where there is none the
    run is halved, as the server retries with half the batch. The head then stands behind them; freeing a lower cell takes it back. A
    request gets the unused slot with which it shares the longest beginning, if that is more than a given part of its prompt, else the
    one released longest ago; it goes on after the common beginning, and the rest of the slot is dropped.

    Source: llama.cpp, https://github.com/ggml-org/llama.cpp: `find_slot` and `seq_rm` of the unified KV cache, `get_available_slot` and
        the retry in `update_slots` of tools/server.
    Parameters:
        n_parallel: slots, 1 to 65,536 (-np).
        slot_prompt_similarity: the common part of the prompt must be more than this share of it, in [0, 1] (-sps); 0: never asked.
    Deviations: a cell is a block of `block_size` tokens; 1 is llama.cpp's, and common beginnings count in whole blocks. Earlier servers
        divided by the length of the slot's content and took 0.5. The sequences of one request take a slot each and copy the prompt's cells
        instead of marking them as common. Slots have no share of the buffer of their own (-kvu); short of cells, unused slots are
        emptied in the order of their ids, as the server does.
    """

    def __init__(self, n_parallel: int = 4, slot_prompt_similarity: float = 0.1) -> None:
        is_count = type(n_parallel) is int and 1 <= n_parallel <= MAX_SLOTS
        require(is_count, self, "n_parallel", n_parallel, f"an integer from 1 to {MAX_SLOTS}")
        is_share = is_number(slot_prompt_similarity) and 0 <= slot_prompt_similarity <= 1
        require(is_share, self, "slot_prompt_similarity", slot_prompt_similarity, "a number in [0, 1]")
        self.n_parallel = n_parallel
        self.slot_prompt_similarity = slot_prompt_similarity
        self.reset()

    def reset(self) -> None:
        """The head at the start."""
        self._head = 0

    @property
    def num_slots(self) -> int:
        """n_parallel."""
        return self.n_parallel

    # ------------------------------------------------------------------ cells

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        """Runs from the head on, as long as can be found: the whole, or halves of it."""
        if num_blocks > len(free):
            return None
        head = self._head
        if head > free.num_blocks - len(free) + 2 * num_blocks:
            head = 0  # more room before the head than there is in use: begin again, in the hope to fill it
        whole = free.first_run(num_blocks, head)
        whole = free.first_run(num_blocks) if whole is None else whole
        if whole is not None:
            return list(range(whole, whole + num_blocks))
        return _in_parts(num_blocks, head, free)

    def regrow(self, region: Sequence[int], num_blocks: int, free: FreeView) -> list[int] | None:
        """What it has stays; further cells from the head on."""
        more = self.place(num_blocks - len(region), free)
        return None if more is None else [*region, *more]

    def took(self, block_ids: Sequence[int]) -> None:
        """The head stands behind the last cell."""
        if block_ids:
            self._head = block_ids[-1] + 1

    def gave(self, block_id: int) -> None:
        """The head goes back to a lower free cell."""
        self._head = min(self._head, block_id)

    # ------------------------------------------------------------------ slots

    def choose_slot(self, num_tokens: int, slots: Sequence[SlotView]) -> int:
        """The most similar, if it is similar enough; else the one released longest ago."""
        similar = [slot for slot in slots if slot.num_shared_tokens > self.slot_prompt_similarity * num_tokens]
        if similar and self.slot_prompt_similarity:
            return max(similar, key=lambda slot: (slot.num_shared_tokens, -slot.slot_id)).slot_id
        return min(slots, key=lambda slot: (slot.released, slot.slot_id)).slot_id


def _in_parts(num_blocks: int, head: int, free: FreeView) -> list[int]:
    """Half of it from the head on, and so on, where there is no run for the whole; what was too long once is not tried again."""
    runs, placed, size = free.runs(), list[int](), num_blocks // 2
    while len(placed) < num_blocks:
        size = min(size, num_blocks - len(placed))
        first = _run_from(head, size, runs)
        if first is None:
            size //= 2
            continue
        placed += range(first, first + size)
        runs = _without(first, size, runs)
        head = first + size
    return placed


def _run_from(head: int, size: int, runs: list[tuple[int, int]]) -> int | None:
    """First cell of `size` consecutive free ones, sought from `head` to the end and then from the start."""
    ahead = ((max(first, head), first + length) for first, length in runs if first + length > head)
    for first, end in (*ahead, *((first, first + length) for first, length in runs)):
        if end - first >= size:
            return first
    return None


def _without(first: int, size: int, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The runs without `size` cells from `first` on."""
    left = []
    for start, length in runs:
        if start <= first < start + length:
            parts = ((start, first - start), (first + size, start + length - first - size))
            left += [(at, part) for at, part in parts if part]
        else:
            left.append((start, length))
    return left
