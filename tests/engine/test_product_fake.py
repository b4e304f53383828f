"""The full product of lossless policies over the fake model (see `engine_product`): every case, every token, every mechanism."""

from __future__ import annotations

import itertools
from collections import Counter

import engine_product
import pytest
from engine_support import policy_names

NEW = [(seam, name) for seam, base in engine_product.BASE.items() for name in policy_names(seam) if name not in base]


@pytest.mark.slow
@pytest.mark.parametrize("batching", engine_product.BASE["batching"])
@pytest.mark.parametrize("block_size", engine_product.BLOCK_SIZES)
def test_no_lossless_policy_changes_a_token(block_size: int, batching: str) -> None:
    """prefix cache x eviction x recompute, swap, the cheaper of both x watermark x scheduling x victim x layout. No randomness: prompts
    are those of seeds 1 to 5."""
    totals: Counter[str] = Counter()
    by_cheaper: Counter[str] = Counter()
    blocked = 0
    for case in engine_product.cases(block_size, batching):
        log, counts = engine_product.run(case)
        engine_product.check(case, log, counts)
        totals += counts
        if case.mode == "cheaper_of_both":
            by_cheaper += counts
        blocked += counts["blocked by watermark"] if case.watermark else 0
    print(f"\nB = {block_size}, {batching}: {dict(sorted(totals.items()))}")
    assert by_cheaper["preempted by swap"], "the cheaper way was never swap"
    # Blocks of one token are always full: what moves and what would be computed again grow alike, and the choice never changes.
    assert block_size == 1 or by_cheaper["preempted by recompute"], "the cheaper way was never recomputation"
    assert blocked, "no watermark ever kept anybody out"
    assert totals["cases"] == len(list(engine_product.cases(block_size, batching)))


@pytest.mark.slow
@pytest.mark.parametrize(("seam", "name"), NEW, ids=lambda part: part)
def test_a_further_policy_changes_no_token(seam: str, name: str) -> None:
    """Of each further policy's product with those above every 97th case, all its block sizes among them."""
    chosen = list(engine_product.cases_with(seam, name))[::97]
    assert {case.block_size for case in chosen} == set(engine_product.BLOCK_SIZES)
    for case in chosen:
        engine_product.check(case, *engine_product.run(case))


@pytest.mark.slow
def test_draws_from_the_whole_product_change_no_token() -> None:
    """800 combinations of any policies; the seed is the same in every run, and every policy is drawn."""
    drawn = list(engine_product.random_cases(1, 800))
    for seam in engine_product.BASE:
        field = {"preemption": "victim"}.get(seam, seam)
        assert {getattr(case, field) for case in drawn} == set(policy_names(seam)), seam
    for case in drawn:
        engine_product.check(case, *engine_product.run(case))


@pytest.mark.full
@pytest.mark.parametrize(("seam", "name"), NEW, ids=lambda part: part)
def test_a_further_policy_changes_no_token_at_length(seam: str, name: str) -> None:
    """Every twentieth case of the same 110,000."""
    for case in itertools.islice(engine_product.cases_with(seam, name), 0, None, 20):
        engine_product.check(case, *engine_product.run(case))


@pytest.mark.full
def test_many_draws_from_the_whole_product() -> None:
    """2,000 combinations, others than above."""
    for case in engine_product.random_cases(2, 2_000):
        engine_product.check(case, *engine_product.run(case))
