"""What a prefix cache without a limit would have found in a run's prompts, from the run's block events.

A run does not keep its prompts' tokens, but every full block that was computed is published under a key that stands for all tokens up
to its end. With room for ever, each such content is computed once, by whoever publishes it first, and found by all who come after it:
what `kvlab.replay` finds in the same prompts, served in that order, with as many blocks as it likes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd


class Bound(NamedTuple):
    """Prompt tokens of the requests that ended.

    Attributes:
        asked: all. found: in the cache. possible: those that a cache without a limit would have found. too_short: further ones it would
            have held, in beginnings below `min_match_tokens`. alongside: of those missed, by requests that began while another ran.
    """

    asked: int
    found: int
    possible: int
    too_short: int
    alongside: int

    @property
    def missed(self) -> float:
        """Share of the prompt tokens that it would have found and this cache did not."""
        return (self.possible - self.found) / self.asked


def unlimited(requests: pd.DataFrame, blocks: pd.DataFrame, block_size: int, min_match_tokens: int = 0) -> tuple[Bound | None, str]:
    """The bound; or None, and why it is not known.

    As in the engine only full blocks are found, at most `num_prompt_tokens - 1` tokens of a prompt. A prompt that was computed in part
    (its request ended before) counts as far as that.

    Args:
        requests, blocks: frames of a run (`kvlab.trace.schema`). min_match_tokens: the policy's; a shorter beginning is not used.
    """
    served = requests[requests["first_scheduled_s"].notna()]
    if blocks.empty:
        return None, "record.blocks=true records it"
    published = blocks[(blocks["kind"] == "publish") & (blocks["tier"] == "gpu")].drop_duplicates("content")
    asked = int(served["num_prompt_tokens"].sum())
    if published.empty or asked <= 0:
        return None, "no block was published" if published.empty else "no request that ended was recorded"
    if published["parent"].isna().any():
        return None, "recorded by an older version, which did not keep what follows what"
    computed = served["num_cached_tokens"] + served["num_computed_tokens"] - served["num_wasted_tokens"]
    num_blocks = np.minimum(served["num_prompt_tokens"] - 1, computed) // block_size
    most = dict(zip(served["request_id"], num_blocks, strict=True))
    depth, num_first = dict[str, int](), dict.fromkeys(most, 0)
    for content, parent, request_id in zip(published["content"], published["parent"], published["request_id"], strict=True):
        if parent and parent not in depth:
            return None, "what came before some of the blocks was not recorded"
        depth[content] = depth[parent] + 1 if parent else 0
        if depth[content] < most.get(request_id, 0):
            num_first[request_id] += 1
    held = block_size * (np.asarray(num_blocks) - served["request_id"].map(num_first).to_numpy())
    usable = np.where(held >= min_match_tokens, held, 0)
    found = served["num_cached_tokens"].to_numpy()
    alongside = np.maximum(usable - found, 0)[began_alongside(served)]
    return Bound(asked, int(found.sum()), int(usable.sum()), int((held - usable).sum()), int(alongside.sum())), ""


def began_alongside(served: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """[R] of requests that were scheduled: True where another one had been, or was then, and had not ended. One that has no end
    (it was not recorded) can't be known here."""
    start, end = (served[column].to_numpy(dtype=np.float64) for column in ("first_scheduled_s", "finish_s"))
    num_begun = np.searchsorted(np.sort(start), start, side="right")
    num_ended = np.searchsorted(np.sort(end), start, side="right")
    return num_begun - num_ended > 1


def evicted_too_early(blocks: pd.DataFrame) -> int:
    """Blocks published again after the same content had been evicted."""
    gone: set[str] = set()
    again = 0
    moves = blocks[(blocks["tier"] == "gpu") & blocks["kind"].isin(("evict", "publish")) & (blocks["content"] != "")]
    for kind, content in zip(moves["kind"], moves["content"], strict=True):
        if kind == "evict":
            gone.add(content)
        elif content in gone:
            gone.discard(content)
            again += 1
    return again
