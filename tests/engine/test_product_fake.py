"""The full product of lossless policies over the fake model (see `engine_product`): every case, every token, every mechanism."""

from __future__ import annotations

from collections import Counter

import engine_product
import pytest
from engine_support import policy_names


@pytest.mark.slow
@pytest.mark.parametrize("batching", policy_names("batching"))
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
