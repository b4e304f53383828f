"""Admission for the worst case."""

from __future__ import annotations

from kvlab.policies.admission._footprint import blocks_to_come
from kvlab.policies.base import AdmissionPolicy, EntryView
from kvlab.types import Now, PoolView


class ReserveAll(AdmissionPolicy):
    """A group enters only if prompt and max_tokens of it and of all that run fit together: nobody is ever preempted.

    Source: Orca's reservation of max_tokens slots at entry (Yu et al., OSDI 2022),
        https://www.usenix.org/conference/osdi22/presentation/yu, as the "Max" and "Oracle" baselines of Kwon et al., SOSP 2023,
        https://arxiv.org/abs/2309.06180
    Parameters: none. Whole sequences are tested in any case.
    Deviations: the room is reserved by count, not by place, so it works with paged blocks; blocks that a running group shares
        with its own samples count once.
    """

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """Own worst case + what each running group may still take <= available."""
        group = entry.group
        promised = sum(blocks_to_come(o, o.num_prompt_tokens + o.max_tokens, pool.block_size) for o in entry.running)
        if entry.blocks_for(group.num_prompt_tokens + group.max_tokens) + promised <= entry.num_available_blocks:
            return ""
        return "reserve_all" if entry.blocks_for(entry.first_chunk_tokens) <= entry.num_available_blocks else "blocks"
