"""The radix tree by itself: structures worked out by hand, and its matches against a comparison with every cached path."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache.radix import RadixTree, TreeMatch, pack
from kvlab.cache.shareable import common_prefix_len

ROOT = b"root"


def cache(tree: RadixTree, tokens: list[int], first_id: int, root: bytes = ROOT) -> list[int]:
    """Cache a prompt's full blocks as the engine does: what is found stays, the rest is inserted head to tail from `first_id` on."""
    size = tree.block_size
    most = len(tokens) // size * size
    block_ids = list(tree.match(root, pack(tokens), most).block_ids)
    for at in range(len(block_ids) * size, most, size):
        parent = block_ids[-1] if block_ids else -1
        block_ids.append(first_id)
        assert tree.insert(root, parent, [first_id], pack(tokens[at : at + size]))
        first_id += 1
    return block_ids


def match(tree: RadixTree, tokens: list[int], num_tokens: int | None = None, root: bytes = ROOT) -> TreeMatch:
    return tree.match(root, pack(tokens), len(tokens) if num_tokens is None else num_tokens)


def test_blocks_of_one_prompt_are_one_run() -> None:
    """B = 2, five tokens: two full blocks, one node."""
    tree = RadixTree(2)
    assert tree.dump(ROOT) == []
    assert cache(tree, [1, 2, 3, 4, 5], 0) == [0, 1]
    assert tree.dump(ROOT) == [([1, 2, 3, 4], [0, 1], [])]
    assert len(tree) == 2
    assert cache(tree, [1, 2, 3, 4, 5, 6], 2) == [0, 1, 2]  # the run goes on
    assert tree.dump(ROOT) == [([1, 2, 3, 4, 5, 6], [0, 1, 2], [])]


def test_a_run_is_split_where_two_paths_part() -> None:
    """SGLang's picture: a shared head, two tails; a third prompt splits the head itself."""
    tree = RadixTree(1)
    cache(tree, [1, 2, 3, 4], 0)
    assert cache(tree, [1, 2, 3, 9, 9], 4) == [0, 1, 2, 4, 5]
    assert tree.dump(ROOT) == [([1, 2, 3], [0, 1, 2], [([4], [3], []), ([9, 9], [4, 5], [])])]
    assert cache(tree, [1, 7], 6) == [0, 6]
    assert tree.dump(ROOT) == [
        ([1], [0], [([2, 3], [1, 2], [([4], [3], []), ([9, 9], [4, 5], [])]), ([7], [6], [])]),
    ]
    assert cache(tree, [5], 7) == [7]
    assert [tokens for tokens, _, _ in tree.dump(ROOT)] == [[1], [5]]
    assert cache(tree, [1, 2, 3, 4, 4], 8) == [0, 1, 2, 3, 8]  # a leaf that was split off goes on as a run
    assert tree.dump(ROOT)[0][2][0][2][0] == ([4, 4], [3, 8], [])


def test_a_run_of_blocks_goes_in_at_once() -> None:
    """As a new path, as the end of a run, and as a branch inside one."""
    tree = RadixTree(2)
    assert tree.insert(ROOT, -1, [0, 1], pack([1, 2, 3, 4]))
    assert tree.insert(ROOT, 1, [2, 3], pack([5, 6, 7, 8]))
    assert tree.dump(ROOT) == [([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3], [])]
    assert tree.insert(ROOT, 1, [4, 5], pack([9, 9, 8, 8]))
    assert tree.dump(ROOT) == [([1, 2, 3, 4], [0, 1], [([5, 6, 7, 8], [2, 3], []), ([9, 9, 8, 8], [4, 5], [])])]


def test_runs_part_at_block_boundaries_only() -> None:
    """B = 2: [1 2 3 4] and [1 2 3 9] share one block; [1 8] shares none, though it begins with the same token."""
    tree = RadixTree(2)
    cache(tree, [1, 2, 3, 4], 0)
    cache(tree, [1, 2, 3, 9], 2)
    cache(tree, [1, 8], 3)
    assert tree.dump(ROOT) == [([1, 2], [0], [([3, 4], [1], []), ([3, 9], [2], [])]), ([1, 8], [3], [])]


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "expected"),
    [
        # The tree: [1 2 3 4 5 6] in blocks 0, 1, 2; after [1 2] also [3 7] in block 3 and [9 9] in block 4.
        ([1, 2, 3, 4, 5, 6], 6, ([0, 1, 2], -1, 0)),
        ([1, 2, 3, 4, 5, 6], 5, ([0, 1], 2, 1)),  # at most 5 tokens: the last block can only be copied from
        ([1, 2, 3, 4, 5, 6], 4, ([0, 1], -1, 0)),
        ([1, 2, 3, 4, 5, 6], 1, ([], 0, 1)),
        ([1, 2, 3, 4, 5, 6], 0, ([], -1, 0)),
        ([1, 2, 3, 4, 8, 8], 6, ([0, 1], -1, 0)),
        ([1, 2, 3, 4, 5, 8], 6, ([0, 1], 2, 1)),  # inside a run
        ([1, 2, 3, 7, 1, 1], 6, ([0, 3], -1, 0)),
        ([1, 2, 9, 8], 4, ([0], 4, 1)),  # among children
        ([1, 2, 3, 8], 4, ([0], 3, 1)),  # blocks 1 and 3 share as much: the one that follows in order of tokens
        ([1, 9], 2, ([], 0, 1)),
        ([2], 1, ([], -1, 0)),
        ([1, 2, 3], 3, ([0], 1, 1)),
    ],
)
def test_match_at_page_granularity(tokens: list[int], num_tokens: int, expected: tuple[list[int], int, int]) -> None:
    """Whole blocks, then what the next cached block shares (B = 2)."""
    tree = RadixTree(2)
    cache(tree, [1, 2, 3, 4, 5, 6], 0)
    cache(tree, [1, 2, 3, 7], 3)
    cache(tree, [1, 2, 9, 9], 4)
    assert match(tree, tokens, num_tokens) == expected
    assert tree.match(ROOT, pack(tokens), num_tokens, beyond=False) == (expected[0], -1, 0)


def test_the_block_that_continues_another_is_found_by_its_tokens() -> None:
    """Inside a run, at its end, at a root."""
    tree = RadixTree(2)
    cache(tree, [1, 2, 3, 4], 0)
    cache(tree, [1, 2, 3, 4, 5, 6], 2)
    cache(tree, [1, 2, 3, 4, 7, 7], 3)
    for parent_id, tokens, expected in [(-1, [1, 2], 0), (-1, [1, 3], -1), (0, [3, 4], 1), (0, [3, 5], -1), (1, [5, 6], 2), (1, [7, 7], 3),
                                        (1, [7, 8], -1), (2, [1, 1], -1), (9, [1, 2], -1)]:  # fmt: skip
        assert tree.child(ROOT, parent_id, pack(tokens)) == expected
    assert tree.child(b"other", -1, pack([1, 2])) == -1


def test_match_at_size_one_finds_every_token_and_nothing_beyond() -> None:
    tree = RadixTree(1)
    cache(tree, [1, 2, 3], 0)
    cache(tree, [1, 2, 4], 3)
    assert match(tree, [1, 2, 4, 5]) == ([0, 1, 3], -1, 0)
    assert match(tree, [1, 2, 5]) == ([0, 1], -1, 0)
    assert match(tree, [1, 2, 3], 2) == ([0, 1], -1, 0)
    assert match(tree, [7]) == ([], -1, 0)


def test_what_is_shared_below_a_block_is_found_among_many_children() -> None:
    """B = 4, a hundred first blocks that share 0 to 3 tokens with the query: block 57 shares most. Large ids don't confuse the order."""
    tree = RadixTree(4)
    for i in range(100):
        tree.insert(ROOT, -1, [i], pack([300, 70_000, i, 1] if i != 57 else [300, 70_000, 65_536, 1]))
    assert match(tree, [300, 70_000, 65_536, 2]) == ([], 57, 3)
    assert match(tree, [300, 70_000, 256, 2]).num_beyond == 2
    assert match(tree, [300, 70_001, 57, 1]).num_beyond == 1
    assert match(tree, [299, 70_000, 57, 1]) == ([], -1, 0)


def test_salts_have_trees_of_their_own() -> None:
    tree = RadixTree(1)
    cache(tree, [1, 2], 0)
    cache(tree, [1, 2], 2, b"other")
    assert match(tree, [1, 2]).block_ids == [0, 1]
    assert match(tree, [1, 2], root=b"other").block_ids == [2, 3]
    assert match(tree, [1, 2], root=b"third") == ([], -1, 0)


def test_nodes_vanish_with_their_blocks() -> None:
    """Leaves go one by one, tail first; at last nothing is left, not even the salt's root."""
    tree = RadixTree(2)
    cache(tree, [1, 2, 3, 4, 5, 6], 0)
    cache(tree, [1, 2, 3, 4, 7, 7], 3)
    assert tree.dump(ROOT) == [([1, 2, 3, 4], [0, 1], [([5, 6], [2], []), ([7, 7], [3], [])])]
    tree.remove(2)
    assert tree.dump(ROOT) == [([1, 2, 3, 4], [0, 1], [([7, 7], [3], [])])]  # as in SGLang, an only child is not joined to its parent
    assert match(tree, [1, 2, 3, 4, 5, 6]) == ([0, 1], -1, 0)
    tree.remove(3)
    tree.remove(1)
    assert tree.dump(ROOT) == [([1, 2], [0], [])]
    assert cache(tree, [1, 2, 8, 8], 1) == [0, 1]
    assert tree.dump(ROOT) == [([1, 2, 8, 8], [0, 1], [])]
    tree.remove(1)
    tree.remove(0)
    assert (len(tree), tree.roots, tree.dump(ROOT)) == (0, {}, [])


def test_what_loses_its_head_is_not_found_until_it_hangs_again() -> None:
    """Only where a path is not held as a whole (a window gave up its head): what lay below is in the tree no more."""
    tree = RadixTree(1)
    cache(tree, [1, 2, 3], 0)
    cache(tree, [1, 2, 4], 3)
    tree.remove(1)
    assert tree.dump(ROOT) == [([1], [0], [])]
    assert [block in tree for block in range(4)] == [True, False, False, False]
    tree.remove(2)  # it goes later, and is known no more
    assert not tree.insert(ROOT, 3, [7], pack([5]))  # nor is what would follow block 3
    assert tree.insert(ROOT, 0, [8], pack([2]))
    assert tree.insert(ROOT, 8, [3], pack([4]))  # block 3 hangs again
    assert match(tree, [1, 2, 4]).block_ids == [0, 8, 3]


# ------------------------------------------------------------------------------------------- against brute force

SIZES, PICKS = st.sampled_from([1, 2, 3, 4]), st.lists(st.integers(0, 100), max_size=10)
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=8)


@settings(deadline=None, max_examples=200)
@given(PROMPTS, st.lists(st.integers(0, 2), max_size=16), SIZES, PICKS, st.data())
def test_a_match_is_the_longest_common_prefix_with_any_cached_path(
    prompts: list[list[int]], query: list[int], size: int, removals: list[int], data: st.DataObject
) -> None:
    """Over random prompts, removals of random leaves and limits: blocks, and tokens beyond, as a comparison with every path gives them."""
    tree, paths = RadixTree(size), dict[tuple[int, ...], int]()  # path of whole blocks -> block id
    for prompt in prompts:
        for at, block_id in enumerate(cache(tree, prompt, len(paths) + 1000), start=1):
            assert paths.setdefault(tuple(prompt[: at * size]), block_id) == block_id
    for pick in removals:
        leaves = [path for path in paths if not any(len(other) > len(path) and other[: len(path)] == path for other in paths)]
        if leaves:
            tree.remove(paths.pop(leaves[pick % len(leaves)]))
    limit = data.draw(st.integers(0, len(query)))
    found = tree.match(ROOT, pack(query), limit)
    whole = 0
    while (whole + 1) * size <= limit and tuple(query[: (whole + 1) * size]) in paths:
        whole += 1
    assert found.block_ids == [paths[tuple(query[: at * size])] for at in range(1, whole + 1)]
    head, rest = tuple(query[: whole * size]), query[whole * size : min(limit, (whole + 1) * size)]
    beyond = {block_id: common_prefix_len(list(path[whole * size :]), rest) for path, block_id in paths.items()
              if len(path) == (whole + 1) * size and path[: whole * size] == head}  # fmt: skip
    assert found.num_beyond == max(beyond.values(), default=0)
    assert found.source == -1 if not found.num_beyond else beyond[found.source] == found.num_beyond
    assert len(tree) == len(paths)


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_prefix_len_is_where_the_first_difference_is(a: list[int], b: list[int]) -> None:
    wanted = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix_len(a, b) == common_prefix_len(tuple(a), tuple(b)) == common_prefix_len(pack(a), pack(b)) == wanted
    assert common_prefix_len(bytes(a), bytes(b)) == wanted
