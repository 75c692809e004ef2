"""Tables of docs/formats.md that are made from what is declared: a key, what it holds and is.

Types and ranges are those that files are checked by (`wavealign.structures`), words those of the
docstrings. `python tests/formats.py` writes the tables anew; tests/test_structures.py says when
they are out of date.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec

from wavealign.runs.launch import Launch
from wavealign.runs.result import Environment, Outcome, RunRow
from wavealign.runs.trial import TrialRecord, TrialRow
from wavealign.structures import in_words

PAGE = Path(__file__).parent.parent / "docs/formats.md"
# By the name of a table: the structure, and the classes whose docstrings say what its keys are.
TABLES: dict[str, tuple[Any, tuple[type, ...]]] = {
    "run": (RunRow, (Launch, Outcome, Environment)),
    "trial": (TrialRow, (TrialRecord,)),
}
OWN = {
    "id": "hash of `spec` without the mask's name",
    "result": "the row (`wavealign.run/1`) of a trial that is done, else null",
}


def attributes(cls: type) -> dict[str, str]:
    """What the docstring of a class says of its attributes."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.getdoc(cls).splitlines():
        if entry := re.fullmatch(r"    ([a-z]\w*(?:, \w+)*): (.*)", line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith("        ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found


def table(structure: Any, classes: tuple[type, ...]) -> str:
    """The keys of a structure, one a line."""
    docs = {name: text for cls in classes for name, text in attributes(cls).items()} | OWN
    info = msgspec.inspect.type_info(structure)
    lines = ["| key | holds | what it is |", "|---|---|---|", f'| `schema` | "{info.tag}" | |']
    for field in info.fields:
        text = re.sub(r"``(.*?)``", r"`\1`", docs[field.name]).replace("None", "null").rstrip(".")
        holds = in_words(field.type).replace("|", "\\|")
        lines.append(f"| `{field.name}` | {holds} | {text} |")
    return "\n".join(lines)


def made(text: str) -> str:
    """The page with today's tables between their markers."""
    for name, parts in TABLES.items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{table(*parts)}{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
