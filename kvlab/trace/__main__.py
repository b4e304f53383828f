"""`python -m kvlab.trace` prints every recorded column and summary figure as Markdown."""

from kvlab.doors import exit_code
from kvlab.trace.schema import TABLES, markdown_table
from kvlab.trace.summary import markdown_figures


def document() -> str:
    """All tables of a run folder, then the figures of its summary.json."""
    tables = [f"## {name}\n\n{markdown_table(columns)}" for name, columns in TABLES.items()]
    return "\n".join([*tables, f"## summary.json\n\n{markdown_figures()}"])


if __name__ == "__main__":
    raise SystemExit(exit_code(lambda: print(document(), end="")))
