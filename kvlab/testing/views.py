"""Small stand-ins for the engine's views. Writing to one is noticed; reading the oracle is counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from kvlab.testing.rules import ReadOnlyError, Rules
from kvlab.types import GroupView


class View:
    """An object with the given attributes that no one but `set_view` may change."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __setattr__(self, name: str, value: object) -> None:
        raise ReadOnlyError(f"{name} of a {type(self).__name__} was set to {value!r}")

    def __delattr__(self, name: str) -> None:
        raise ReadOnlyError(f"{name} of a {type(self).__name__} was deleted")


def set_view(view: View, **attributes: Any) -> None:
    """What the engine does to its own objects."""
    view.__dict__.update(attributes)


class Group(View):
    """A GroupView."""

    group_id: int
    request_id: str
    arrival_s: float
    priority: int
    tenant: str
    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_uncomputed_tokens: int
    num_unshared_blocks: int
    num_published_tokens: int
    num_unpublished_tokens: int
    num_cacheable_tokens: int
    num_preemptions: int
    admitted_step: int
    admission_order: int
    oracle_reads: list[int]

    @property
    def oracle_output_len(self) -> int:
        """Noted: see `no_oracle`."""
        self.oracle_reads.append(self.group_id)
        return self.max_tokens


class Pool(View):
    """A PoolView."""

    num_blocks: int
    num_free: int
    num_evictable: int
    num_used: int
    block_size: int


class Queues(View):
    """A QueuesView."""

    waiting: tuple[Group, ...]
    running: tuple[Group, ...]
    swapped: tuple[Group, ...]

    @property
    def num_waiting(self) -> int:
        """Length of waiting."""
        return len(self.waiting)


class Prefixes:
    """A PrefixesView: every third request begins alike, and some beginnings are cached."""

    block_size = 8

    def __init__(self, rng: Random) -> None:
        self._num_cached_blocks = [rng.choice((0, 0, 1, 5)) for _ in range(3)]

    def keys(self, group: GroupView) -> Sequence[bytes]:
        """Of full blocks up to the last token but one."""
        return [b"%d/%d" % (group.group_id % 3, i) for i in range((group.num_tokens - 1) // self.block_size)]

    def num_cached_tokens(self, group: GroupView) -> int:
        """Of its longest cached beginning."""
        return min(self._num_cached_blocks[group.group_id % 3], len(self.keys(group))) * self.block_size


class Entry(View):
    """An EntryView over a model without sharing: each sequence needs ceil(tokens / block size) blocks, less those it hits."""

    group: Group
    kind: str
    first_chunk_tokens: int
    num_available_blocks: int
    running: tuple[Group, ...]
    block_size: int
    num_hits: int
    rules: Rules

    def blocks_for(self, num_tokens: int) -> int:
        """New blocks for `num_tokens` tokens of each sequence."""
        legal = isinstance(num_tokens, int) and num_tokens >= 1
        self.rules.require(legal, "never fails", f"blocks_for({num_tokens!r}) was asked")
        return max(0, -(-num_tokens // self.block_size) * self.group.num_sequences - self.num_hits)


class Free:
    """A FreeView over a set of ids."""

    def __init__(self, block_ids: Sequence[int], num_blocks: int) -> None:
        self.block_ids = tuple(sorted(block_ids))
        self.num_blocks = num_blocks

    def __len__(self) -> int:
        return len(self.block_ids)

    def lowest(self, num_blocks: int) -> list[int]:
        """The lowest ids."""
        return list(self.block_ids[:num_blocks])

    def first_run(self, num_blocks: int, start: int = 0) -> int | None:
        """First id of the lowest run."""
        ids = set(self.block_ids)
        runs = (first for first in self.block_ids if first >= start and all(first + i in ids for i in range(num_blocks)))
        return next(runs, None)

    def runs(self) -> list[tuple[int, int]]:
        """(first id, length) of runs that end where a block is not free."""
        ids = set(self.block_ids)
        firsts = [first for first in self.block_ids if first - 1 not in ids]
        return [(first, next(n for n in range(1, len(ids) + 1) if first + n not in ids)) for first in firsts]

    def also(self, block_ids: Sequence[int]) -> Free:
        """With further ids."""
        return Free((*self.block_ids, *block_ids), self.num_blocks)


def random_groups(rng: Random, num_groups: int, first_id: int = 0) -> list[Group]:
    """Groups in order of submission; small numbers, so that ties are frequent."""
    groups = []
    for group_id in range(first_id, first_id + num_groups):
        prompt, output = rng.randint(1, 40), rng.choice((0, 0, rng.randint(1, 20)))
        computed, num_blocks = rng.randint(0, prompt + output), rng.randint(1, 12)
        groups.append(Group(
            group_id=group_id, request_id=f"r{group_id}", arrival_s=rng.choice((0.0, 0.5, 1.0)) * group_id,
            priority=rng.randint(-1, 2), tenant=rng.choice(("", "a", "b")), num_sequences=rng.choice((1, 1, 4)),
            num_prompt_tokens=prompt, num_output_tokens=output, max_tokens=rng.randint(max(1, output), 40),
            num_tokens=prompt + output, num_computed_tokens=computed, num_blocks=num_blocks,
            num_uncomputed_tokens=max(1, prompt + output - computed), num_unshared_blocks=rng.randint(0, num_blocks),
            num_published_tokens=rng.randint(0, computed), num_unpublished_tokens=rng.randint(0, computed),
            num_cacheable_tokens=prompt // 2 if group_id % 5 == 4 else sys.maxsize,
            num_preemptions=rng.randint(0, 2), admitted_step=rng.randint(0, 9), admission_order=group_id, oracle_reads=[],
        ))  # fmt: skip
    return groups


@contextmanager
def no_oracle(groups: Sequence[Group], policy: object, rules: Rules) -> Iterator[None]:
    """Only a policy that says so, by its name or by `reads_oracle`, may have looked at the future meanwhile."""
    yield
    if "oracle" not in type(policy).__name__.lower() and not getattr(policy, "reads_oracle", False):
        rules.require(not any(group.oracle_reads for group in groups), "no oracle", "oracle_output_len was read")
