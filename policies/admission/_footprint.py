"""What a group will hold, in blocks: shared by the policies that look ahead."""

from __future__ import annotations

from kvlab.types import GroupView


def blocks_at(group: GroupView, num_tokens: int, block_size: int) -> int:
    """Distinct blocks of a group whose sequences have `num_tokens` tokens each.

    Its n sequences share the full blocks of the prompt; each may own all blocks after them (the partial prompt block is copied on
    the first write to it).
    """
    shared = group.num_prompt_tokens // block_size
    return shared + group.num_sequences * max(0, -(-num_tokens // block_size) - shared)


def blocks_to_come(group: GroupView, num_tokens: int, block_size: int) -> int:
    """Blocks that a running group still takes until its sequences have `num_tokens` tokens each."""
    return max(0, blocks_at(group, num_tokens, block_size) - group.num_blocks)
