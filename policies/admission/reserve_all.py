"""Admission for the worst case."""

from __future__ import annotations

from kvlab.policies.base import AdmissionPolicy, EntryView
from kvlab.types import GroupView, Now, PoolView


class ReserveAll(AdmissionPolicy):
    """A group enters only if prompt and max_tokens of it and of all that run fit together: nobody is ever preempted.

    Source: Orca's reservation of max_tokens slots at entry (Yu et al., OSDI 2022),
        https://www.usenix.org/conference/osdi22/presentation/yu, as the "Max" and "Oracle" baselines of Kwon et al., SOSP 2023,
        https://arxiv.org/abs/2309.06180
    Parameters: none.
    Deviations: the room is reserved by count, not by place, so it works with paged blocks; blocks that a running group shares
        with its own samples count once.
    """

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """Own worst case + what each running group may still take <= available."""
        group = entry.group
        promised = sum(_growth_blocks(other, pool.block_size) for other in entry.running)
        if entry.blocks_for(group.num_prompt_tokens + group.max_tokens) + promised <= entry.num_available_blocks:
            return ""
        return "reserve_all" if entry.blocks_for(entry.first_chunk_tokens) <= entry.num_available_blocks else "blocks"


def _growth_blocks(group: GroupView, block_size: int) -> int:
    """Blocks that a running group may still take: its worst case less what it holds.

    Its n sequences share the full blocks of the prompt; each may own all blocks after them (the partial prompt block is copied on
    the first write to it).
    """
    shared = group.num_prompt_tokens // block_size
    longest = -(-(group.num_prompt_tokens + group.max_tokens) // block_size)
    return max(0, shared + group.num_sequences * (longest - shared) - group.num_blocks)
