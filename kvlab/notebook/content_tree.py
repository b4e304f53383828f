"""`prefix_tree(run)`: the prefix cache of a run as the tree of everything ever cached, with hits and evictions over the steps.

A published block is a node; its parent is the block before it. Chains of content keys and a radix tree over tokens are drawn alike: what
differs is how the engine looks them up, not what is the prefix of what.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.template import figure
from kvlab.notebook.block_grid import no_events
from kvlab.notebook.block_log import FREE, TierLog, tier_log
from kvlab.notebook.packing import pack
from kvlab.notebook.widget import StepWidget, channel_of, frame_of, module, run_of
from kvlab.results import Run
from kvlab.types import UserError

MOST_PATHS = 400
"""Paths drawn: those with most hits. No screen shows more."""
NO_CACHE = "Nothing was cached in this run: no block was published (prefix_cache=none, or no prompt filled a block)."
OLD = "This run was recorded by an older version, which did not keep what follows what. Record it again to see the tree."


@dataclass
class Tree:
    """All contents ever published, in the order of their first publication. N contents.

    Attributes:
        keys: [N] content keys in hex. parent: [N], -1 for the first of a prompt. depth: [N], blocks before it. hits: [N] over the run.
        log: their records, as if each were a block. requests: names by number.
    """

    keys: list[str]
    parent: npt.NDArray[np.int64]
    depth: npt.NDArray[np.int64]
    hits: npt.NDArray[np.int64]
    log: TierLog
    requests: list[str]

    def cached(self, step: int) -> list[int]:
        """Contents that are in the pool after a step."""
        return np.flatnonzero(self.log.states([step])[0] != FREE).tolist()

    def children(self) -> list[list[int]]:
        """Of each content, and at the end those that begin a prompt; in order of publication."""
        below: list[list[int]] = [[] for _ in range(len(self.keys) + 1)]
        for i, parent in enumerate(self.parent.tolist()):
            below[parent].append(i)
        return below


class PrefixTree(StepWidget):
    """See `prefix_tree`. `tree`: what it shows."""

    _esm = module("prefix_tree")

    def __init__(self, tree: Tree | None, channel: str = "", **traits: Any) -> None:
        self.tree = tree
        super().__init__(channel, **traits)

    def figure(self, step: int | None = None) -> go.Figure:
        """A static figure: an icicle of what is cached after a step (default: of all that ever was), darker with more hits in the run.

        Runs of blocks in which no two paths part are one box, as wide as its number of blocks.

        Raises:
            UserError: no such step.
        """
        if self.tree is None:
            return self._nothing("Prefix cache")
        if step is not None and not 0 <= step < self.num_steps:
            raise UserError(f"There is no step {step}: this run has steps 0 to {self.num_steps - 1}.")
        return _icicle(self.tree, None if step is None else set(self.tree.cached(step)), step)


def prefix_tree(run: Run | Path | str, step: int = 0) -> PrefixTree:
    """The prefix cache of a run, step by step: a widget.

    A row is a path from a prompt's first block to a leaf, a column a block of it. A block appears when it is published, is dark while a
    table holds it, light while it is cached, pale once evicted; hits of the step are framed. More than 400 paths: those with most hits.

    Args:
        run: a run, or a run's folder, in any state, recorded with `record.blocks=true`. step: shown first.

    Raises:
        UserError: `run` is neither a run nor a path.
    """
    found, why = run_of(run)
    if found is None:
        return PrefixTree(None, meta={"message": why})
    events, broken = frame_of(found, "blocks")
    named = events[(events["content"].fillna("") != "") & (events["tier"] == "gpu")]
    if events.empty or not (named["kind"] == "publish").any():
        return PrefixTree(None, meta={"message": broken or (no_events(found) if events.empty else NO_CACHE)})
    if events["parent"].isna().all():
        return PrefixTree(None, meta={"message": OLD})
    steps, _ = frame_of(found, "steps")
    num_steps = int(max(steps["step"].max() if len(steps) else 0, events["step"].max() if not len(steps) else 0)) + 1
    tree = make_tree(named, num_steps)
    paths = _paths(tree)
    of_node = _rows(tree, paths)
    data, layout = pack(tree.log.arrays("") | of_node | {"depth": tree.depth.astype(np.uint32)})
    num_all = sum(not below for below in tree.children()[:-1])
    notes = [f"{len(paths)} of {num_all:,} paths are drawn: those with most hits."] if len(paths) < num_all else []
    if broken:
        notes.append(broken)
    if found.state != "finished":
        notes.append(f"This run is {found.state}: what it had recorded is shown.")
    meta = {
        "title": f"Prefix cache of {found.name}", "num_steps": num_steps, "layout": layout, "requests": tree.requests,
        "num_rows": len(paths), "num_contents": len(tree.keys), "max_depth": int(tree.depth.max()), "notes": notes,
    }  # fmt: skip
    return PrefixTree(tree, channel_of(found), meta=meta, data=data, step=max(0, min(step, num_steps - 1)))


def make_tree(named: pd.DataFrame, num_steps: int) -> Tree:
    """The tree from block events that carry a content, in order."""
    published = named[named["kind"] == "publish"]
    first = published.drop_duplicates("content")
    number = {key: i for i, key in enumerate(first["content"])}
    rows = named[named["content"].isin(number)]
    parent = np.array([number.get(key, -1) for key in first["parent"].fillna("")], dtype=np.int64)
    depth = np.zeros(len(number), dtype=np.int64)
    for i, above in enumerate(parent.tolist()):  # a parent is published before what follows it
        depth[i] = depth[above] + 1 if 0 <= above < i else 0
    parent[depth == 0] = -1
    codes, names = pd.factorize(rows["request_id"].fillna(""), use_na_sentinel=False)
    order = ["", *(str(n) for n in names if n != "")]
    place = {name: i for i, name in enumerate(order)}
    request = np.array([place[str(n)] for n in names], dtype=np.uint32)[codes]
    ids = rows["content"].map(number)
    log = tier_log(rows.assign(block_id=ids), len(number), num_steps, request)
    hits = np.bincount(ids[rows["kind"] == "hit"], minlength=len(number)).astype(np.int64)
    return Tree(list(number), parent, depth, hits, log, order)


def _paths(tree: Tree) -> list[int]:
    """Leaves to draw, in the order of the tree; at most MOST_PATHS, those whose path has most hits."""
    below = tree.children()
    along = tree.hits.copy()
    for i, parent in enumerate(tree.parent.tolist()):
        along[i] += along[parent] if parent >= 0 else 0
    ordered, todo = [], below[-1][::-1]
    while todo:
        node = todo.pop()
        if below[node]:
            todo += below[node][::-1]
        else:
            ordered.append(node)
    if len(ordered) <= MOST_PATHS:
        return ordered
    best = set(sorted(ordered, key=lambda leaf: (-int(along[leaf]), leaf))[:MOST_PATHS])
    return [leaf for leaf in ordered if leaf in best]


def _rows(tree: Tree, paths: list[int]) -> dict[str, npt.NDArray[np.uint32]]:
    """First row of each content and the rows it spans (0: not drawn)."""
    first, rows = np.zeros(len(tree.keys), dtype=np.uint32), np.zeros(len(tree.keys), dtype=np.uint32)
    for row, leaf in enumerate(paths):
        node = leaf
        while node >= 0:
            if not rows[node]:
                first[node] = row
            rows[node] += 1
            node = int(tree.parent[node])
    return {"first_row": first, "rows": rows}


def _icicle(tree: Tree, only: set[int] | None, step: int | None) -> go.Figure:
    """Chains without a branch as one box each."""
    below = [[c for c in children if only is None or c in only] for children in tree.children()]
    ids, labels, parents, values, hits, texts = ["root"], ["prompts"], [""], [0], [0.0], [""]
    todo = [(node, "root") for node in below[-1][::-1]]
    if only is not None:  # what is cached after a gap (its parent was evicted) hangs from the root
        todo += [(n, "root") for n in sorted(only) if tree.parent[n] >= 0 and int(tree.parent[n]) not in only]
    while todo and len(ids) <= 2000:
        node, parent = todo.pop()
        chain = [node]
        while len(below[chain[-1]]) == 1:
            chain.append(below[chain[-1]][0])
        most = int(tree.hits[chain].max())
        ids.append(tree.keys[node][:16])
        labels.append(f"{len(chain)} block{'' if len(chain) == 1 else 's'}")
        parents.append(parent)
        values.append(len(chain))
        hits.append(float(np.log1p(most)))
        texts.append(f"from block {int(tree.depth[node])} on, key {tree.keys[node][:8]}…<br>{most} hits on its busiest block")
        todo += [(child, ids[-1]) for child in below[chain[-1]][::-1]]
    when = "all that was cached in the run" if step is None else f"after step {step}"
    fig = figure(f"Prefix cache: {when}", 460)
    fig.add_trace(go.Icicle(
        ids=ids, labels=labels, parents=parents, values=values, branchvalues="remainder", customdata=texts, sort=False,
        marker={"colors": hits, "colorscale": [[0, "#E3E3E3"], [0.35, "#56B4E9"], [1, "#0072B2"]], "cmin": 0,
                "line": {"color": "white", "width": 1},
                "colorbar": {"title": {"text": "hits"}, "thickness": 12, **_hit_ticks(hits)}},
        tiling={"orientation": "h"}, hovertemplate="%{label}, %{customdata}<extra></extra>", root={"color": "white"},
    ))  # fmt: skip
    return fig.update_layout(margin={"t": 48, "l": 10, "r": 10, "b": 10})


def _hit_ticks(hits: list[float]) -> dict[str, Any]:
    """Ticks of a logarithmic colour bar at round numbers."""
    most = float(np.expm1(max(hits)))
    round_numbers = [0, *(k * 10**e for e in range(7) for k in (1, 3) if k * 10**e <= most)]
    return {"tickvals": [float(np.log1p(n)) for n in round_numbers], "ticktext": [f"{n:,}" for n in round_numbers]}
