"""The house as a picture: rooms from the top floor down, what each is, and what it uses.

The floors are the import contract of pyproject.toml, the words are the rooms' own docstrings, and
the arrows are the imports that grimp finds, lazy ones included. `python tests/house.py` writes the
picture into CONTRIBUTING.md; tests/test_house.py says when it is out of date.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = "wavealign"
_BEGIN, _END = "<!-- house: begin -->", "<!-- house: end -->"
_WIDTH = 100


def graph() -> grimp.ImportGraph:
    """Every import of the package, also those inside functions."""
    return grimp.build_graph(PACKAGE)


def floors() -> list[list[str]]:
    """The contract's layers from the top down, each the rooms that stand side by side."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [re.split(r"\s*[|:]\s*", layer) for layer in layers]


def uses(imports: grimp.ImportGraph) -> dict[str, set[str]]:
    """Room → the rooms that it imports from."""
    found: dict[str, set[str]] = {}
    for module in imports.modules:
        room = _room(module)
        others = map(_room, imports.find_modules_directly_imported_by(module))
        found.setdefault(room, set()).update(other for other in others if other != room)
    return found


def picture() -> str:
    """One line a room: its name, what it is, and the rooms above the ground that it uses."""
    *upper, ground = floors()
    arrows = uses(graph())
    order = [room for floor in upper for room in floor]
    named = [room for room in order if not room.startswith("_")]
    pad = max(map(len, named)) + 1
    lines = []
    for floor in upper:
        for room in floor:
            used = [other for other in order if other in arrows.get(room, ())]
            lines += _wrapped(f"{room:{pad}} {_what(room)}", pad)
            if used:
                lines += _wrapped(f"{'':{pad}} → {', '.join(used)}", pad + 2)
        lines.append("")
    return "\n".join([*lines, f"ground: {', '.join(ground)}"]) + "\n"


def contributing(text: str) -> str:
    """CONTRIBUTING.md with today's picture between its markers."""
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n```\n{picture()}```\n{_END}{after}"


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else PACKAGE


def _what(room: str) -> str:
    """The first sentence of a room's docstring, without its full stop."""
    folder = ROOT / PACKAGE / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").rstrip(".")


def _wrapped(text: str, indent: int) -> list[str]:
    lines = []
    while len(text) > _WIDTH:
        cut = text.rindex(" ", 0, _WIDTH)
        lines.append(text[:cut].rstrip())
        text = f"{'':{indent}} {text[cut + 1 :]}"
    return [*lines, text.rstrip()]


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(contributing(page.read_text(encoding="utf-8")), encoding="utf-8")
