"""Papers' figures: one folder each under experiments/, drawn from committed results and produced again by one command.

    python -m kvlab.figures list
    python -m kvlab.figures draw watermark_curve       # figure.pdf and figure.svg from results.parquet
    python -m kvlab.figures run watermark_curve        # the results again, and the figure
    python -m kvlab.figures run watermark_curve --verify   # the results again, compared with the committed ones
    python -m kvlab.figures check                      # does every figure follow from its results, and each manifest from its config?

A folder holds `sweep.yaml` (a Hydra experiment, or another kind: kvlab.figures.points), `figure.py` (a `FigureSpec`),
`results.parquet`, `manifest.json`, `figure.pdf`, `figure.svg` and `README.md`.
"""

from kvlab.figures.spec import FigureSpec, Folder, load, names

__all__ = ["FigureSpec", "Folder", "load", "names"]
