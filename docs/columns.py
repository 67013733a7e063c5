"""The table of the trace's columns in docs/guides/monitoring.md, from the package;
``make docs`` writes it.
"""

from __future__ import annotations

from pathlib import Path

from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.run.observe.trace import COLUMNS

PAGE = Path(__file__).parent / "guides" / "monitoring.md"
BEGIN, END = (
    "<!-- from ray_adascale/run/observe/trace.py, by `make docs` -->",
    "<!-- end -->",
)


def page() -> str:
    """Return docs/guides/monitoring.md with a fresh table. A star marks what is
    reported to Ray, too.
    """
    rows = [
        f"| `{key}`{' *' * (key in METRICS)} | {meaning} |"
        for key, meaning in COLUMNS.items()
    ]
    table = "\n".join(["| column | meaning |", "| --- | --- |", *rows])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    fresh = page()
    if fresh != PAGE.read_text(encoding="utf-8"):
        PAGE.write_text(fresh, encoding="utf-8")
