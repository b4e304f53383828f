"""`python -m kvlab.trace`: every recorded column with its dtype, unit and meaning, as Markdown tables."""

from kvlab.trace.schema import TABLES, markdown_table

for name, columns in TABLES.items():
    print(f"## {name}\n\n{markdown_table(columns)}")
