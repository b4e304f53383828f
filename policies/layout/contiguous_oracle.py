"""One consecutive region a sequence, exactly as long as it will get."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import FreeView, LayoutPolicy, RegionNeed
from kvlab.policies.layout._runs import extend_or_fit, first_fit, longest_run
from kvlab.types import UserError


class ContiguousOracle(LayoutPolicy):
    """A sequence owns one region of consecutive blocks for its prompt and its true output length, which an oracle knows.

    Source: "Orca (Oracle)" in Kwon et al., SOSP 2023, section 6.1, https://arxiv.org/abs/2309.06180: the bound that no system with
        contiguous regions can pass.
    Parameters: none. The region holds prompt + min(oracle_output_len, max_tokens) tokens.
    Deviations: the lowest gap that is large enough (first fit; the paper assumes a buddy allocator, which would round the region up to
        a power of two). An output that gets longer than foretold takes the blocks behind its region or, where these are in use, moves
        to a larger one, by a copy.
    """

    shares_blocks = False
    is_contiguous = True

    def reserve_blocks(self, need: RegionNeed) -> int:
        """ceil((prompt + output) / block_size)."""
        if need.oracle_output_len is None:
            raise UserError("layout contiguous_oracle reserves a request's true output length, and this request has none: use a workload "
                            "that knows it (oracle_output_len: synthetic and trace workloads do), or layout=contiguous_max.")  # fmt: skip
        output = min(need.oracle_output_len, need.max_tokens)
        num_tokens = min(need.num_prompt_tokens + output, need.max_model_len)
        return max(need.num_blocks, -(-num_tokens // need.block_size))

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        """The lowest run of `num_blocks` free ids."""
        return first_fit(num_blocks, free)

    def regrow(self, region: Sequence[int], num_blocks: int, free: FreeView) -> list[int] | None:
        """In place where what follows is free, else the lowest run."""
        return extend_or_fit(region, num_blocks, free)

    def largest_region(self, free: FreeView) -> int:
        """The longest run."""
        return longest_run(free)
