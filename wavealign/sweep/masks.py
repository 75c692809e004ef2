"""The masks of a sweep: found, read once, named apart, and cut to the heads that run."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wavealign.errors import InputError, said_of
from wavealign.masks import BlockMask, load_mask
from wavealign.units import format_heads, parse_heads

MASK_SUFFIXES = (".npz", ".npy", ".safetensors", ".pt")


@dataclass(frozen=True)
class SweepMask:
    """A mask file that takes part.

    Attributes:
        name: the file's stem, with as many folders before it as tell it from the others.
        path: as it was found.
        mask: all of its heads.
    """

    name: str
    path: str
    mask: BlockMask

    def launches(self, heads: str) -> list[tuple[str, BlockMask]]:
        """What a value of the axis ``heads`` means here: heads of the file, and their mask.

        Args:
            heads: ``"all"`` in one launch, ``"each"`` in one of its own, or a list like
                ``"0,3-7"``.

        Raises:
            InputError: this mask has no such head.
        """
        if heads == "each":
            return [(str(h), self.mask.select_heads([h])) for h in range(self.mask.H)]
        if heads == "all":
            return [(format_heads(range(self.mask.H)), self.mask)]
        with said_of(self.path):
            chosen = parse_heads(heads, self.mask.H)
        return [(format_heads(chosen), self.mask.select_heads(chosen))]


def find_masks(
    patterns: Sequence[str],
    block: tuple[int, int] | None = None,
    key: str | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> list[SweepMask]:
    """Read the masks that files, folders and globs stand for.

    A folder stands for the mask files directly inside it; one that can't be read as a mask is
    left out there, and said so. A file that was named, or that a glob matched, has to be a mask.

    Args:
        patterns: files, folders and globs (``**`` goes into folders).
        block: tokens per query and K/V block, where the files don't say.
        key: the mask inside files that hold several.
        note: told what was left out, and why.

    Raises:
        InputError: a pattern that matches nothing, or a file that isn't a mask.
    """
    found: dict[Path, bool] = {}  # path -> whether it may be left out
    for pattern in patterns:
        paths, lenient = _matches(pattern)
        for path in paths:
            found[path] = found.get(path, True) and lenient
    masks: list[tuple[Path, BlockMask]] = []
    digests: dict[str, Path] = {}
    for path, lenient in found.items():
        try:
            mask = load_mask(path, block, key).mask
        except InputError as problem:
            if not lenient:
                raise
            note(f"left out, not a mask: {problem}")
            continue
        if mask.digest in digests:
            note(f"left out, the same mask as {digests[mask.digest]}: {path}")
            continue
        digests[mask.digest] = path
        masks.append((path, mask))
    if not masks:
        raise InputError(f"--mask {' '.join(patterns)}: matches no mask file.")
    names = _names([path for path, _ in masks])
    return [
        SweepMask(name if key is None else f"{name}:{key}", str(path), mask)
        for name, (path, mask) in zip(names, masks, strict=True)
    ]


def _matches(pattern: str) -> tuple[list[Path], bool]:
    """The files that a pattern stands for, sorted, and whether some may be left out."""
    path = Path(pattern)
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.suffix in MASK_SUFFIXES and p.is_file())
        if not inside:
            raise InputError(
                f"--mask {pattern}: the folder holds no mask file ({', '.join(MASK_SUFFIXES)})."
            )
        return inside, True
    if glob.has_magic(pattern) and not path.exists():
        found = sorted(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207  # absolute, too
        files = [path for path in found if path.is_file()]
        if not files:
            raise InputError(f"--mask '{pattern}': matches no file.")
        return files, False
    return [path], False


def _names(paths: Iterable[Path]) -> list[str]:
    """Stems, with as many parent folders as it takes to tell them apart."""
    parts = [(*path.resolve().parts[1:-1], path.stem) for path in paths]
    depth = [1] * len(parts)
    while True:
        names = ["/".join(p[-d:]) for p, d in zip(parts, depth, strict=True)]
        clashes = {name for name in names if names.count(name) > 1}
        grown = [
            min(d + 1, len(p)) if name in clashes else d
            for name, p, d in zip(names, parts, depth, strict=True)
        ]
        if grown == depth:
            return names
        depth = grown
