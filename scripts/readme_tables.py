"""Write the tables of samplers, caches, schedules and models into README.md from the registries.

python scripts/readme_tables.py [--check]

`--check` changes nothing and exits with 1 when the README is not up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from dlm_decode.caches import CACHES
from dlm_decode.models import FAMILIES
from dlm_decode.options import OptionInfo
from dlm_decode.registry import Entry
from dlm_decode.samplers import SAMPLERS
from dlm_decode.schedules import SCHEDULES

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- made by scripts/readme_tables.py: begin -->"
END = "<!-- made by scripts/readme_tables.py: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = updated(old)
    if args.check and new != old:
        print("README.md is out of date: run python scripts/readme_tables.py", file=sys.stderr)
        return 1
    if not args.check:
        README.write_text(new, encoding="utf-8")
    return 0


def updated(text: str) -> str:
    """`text` with fresh tables between the two markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def tables() -> str:
    """All tables, each under its heading."""
    return "\n\n".join(
        [
            table("Samplers", SAMPLERS.entries()),
            table("Caches", CACHES.entries(), note="exactness"),
            table("Schedules", SCHEDULES.entries()),
            table("Model families", FAMILIES.entries()),
        ]
    )


def table(heading: str, entries: Iterable[Entry], note: str = "") -> str:
    """A Markdown table; `note` names a class attribute to show in a column of its own."""
    columns = ["name", "rule", *([note] if note else []), "options and defaults", "source"]
    lines = [f"### {heading}", "", _line(columns), _line("---" for _ in columns)]
    return "\n".join(lines + [_line(_cells(entry, note)) for entry in entries])


def _cells(entry: Entry, note: str) -> list[str]:
    options = ", ".join(_option(info) for info in entry.options)
    extra = [str(getattr(entry.cls, note))] if note else []
    rule = f"{entry.summary} A wrapper." if entry.is_wrapper else entry.summary
    return [f"`{entry.name}`", rule, *extra, options, entry.paper]


def _option(info: OptionInfo) -> str:
    return f"`{info.name}={'none' if info.default is None else info.default}`"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
