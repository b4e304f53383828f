"""What became of the requests that a run did not serve to their end, in words."""

from __future__ import annotations

import pandas as pd

ENDS = {"refused": "refused", "abort": "aborted (the client left)", "kv_capacity": "ended early, out of KV space"}
"""`finish_reason` -> what befell a request."""


def unserved(requests: pd.DataFrame) -> list[str]:
    """E.g. "13 of 20 requests were refused (the first: ... can never fit: ...)", a text for each way; [] where all were served.

    Args:
        requests: a run's (`kvlab.trace.schema.REQUESTS`).
    """
    said = []
    for reason, words in ENDS.items():
        details = requests.loc[requests["finish_reason"] == reason, "detail"].fillna("").astype(str)
        if len(details):
            known = [detail for detail in details if detail]
            first = f" (the first: {known[0].removesuffix('.')})" if known else ""
            said.append(f"{len(details):,} of {len(requests):,} requests were {words}{first}")
    return said


def nothing_served(requests: pd.DataFrame) -> str:
    """Why no step was made, where requests were recorded and none was ever scheduled; else ""."""
    if requests.empty or requests["first_scheduled_s"].notna().any():
        return ""
    return f"Nothing was served in this run: {'; '.join(unserved(requests)) or 'no request was ever scheduled'}."
