r"""Text of others made safe to show: names in files and arguments, messages of libraries.

Whatever a file or an argument holds, a terminal, a table and a page show it as text. Control
characters (escape sequences, line breaks), characters that turn the direction of writing and halves
of surrogate pairs stand as Python would write them, e.g. ``\x1b``; what is long loses its middle.
"""

from __future__ import annotations

import re
import unicodedata

_MOST = 2000  # characters of a line or message
_MOST_WORD = 512  # of what stands between two spaces: names and paths
_LONG_WORD = re.compile(rf"\S{{{_MOST_WORD + 1},}}")


def shown(text: object, most: int = _MOST) -> str:
    """A text in one line of at most `most` characters; what was shown already stays as it is."""
    line = str(text)
    if not line.isprintable():
        line = "".join(map(_printable, line))
    line = _LONG_WORD.sub(lambda word: _without_middle(word[0], _MOST_WORD), line)
    return _without_middle(line, most)


def _printable(character: str) -> str:
    # Python calls no space printable but the ASCII one.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


def _without_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    tail = most // 4
    head = most - tail - 40  # what says how much is left out is shorter
    return f"{text[:head]} […{len(text) - head - tail:,} characters…] {text[-tail:]}"
