"""Where Q and K come from: tensors, safetensors files, npz files. One head is read at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from wavealign._extras import require
from wavealign.errors import InputError, said_of
from wavealign.npz import NpzFile
from wavealign.outputs import whole_file
from wavealign.structures import read_json
from wavealign.tensor_files import open_safetensors

_FLOATS = ("F64", "F32", "F16", "BF16")
_HINT = "expected 'q' and 'k', [heads, tokens, head_dim] each"


class QKSource(Protocol):
    """Queries and keys of some heads, read one head at a time."""

    @property
    def heads(self) -> int:
        """How many heads."""

    @property
    def tokens(self) -> int:
        """Length of the sequence."""

    @property
    def head_dim(self) -> int:
        """Elements per head."""

    def describe(self) -> dict[str, Any]:
        """What it is, for a mask's meta."""

    def read(self, head: int) -> tuple[Tensor, Tensor]:
        """Queries and keys of a head, float ``(L, D)`` each."""


@dataclass(frozen=True)
class InMemory:
    """Q and K in memory: what a source of them is, but for where they are from.

    Attributes:
        q: float ``(H, L, D)``, on any device.
        k: as `q`.
    """

    q: Tensor
    k: Tensor

    @property
    def heads(self) -> int:
        """How many heads."""
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.q.shape[2]

    def read(self, head: int) -> tuple[Tensor, Tensor]:
        """Queries and keys of a head, ``(L, D)``."""
        return self.q[head], self.k[head]


@dataclass(frozen=True)
class TensorSource(InMemory):
    """Q and K as they are given.

    Attributes:
        name: for a mask's meta.

    Raises:
        InputError: different shapes, another rank, or a dtype that isn't floating.
    """

    name: str = "tensors"

    def __post_init__(self) -> None:
        for name, x in (("q", self.q), ("k", self.k)):
            _check_dtype(name, str(x.dtype), x.is_floating_point())
        _check_shapes(tuple(self.q.shape), tuple(self.k.shape))

    def describe(self) -> dict[str, Any]:
        """What it is, for a mask's meta."""
        return {"qk": self.name}


class FileSource(AbstractContextManager["FileSource"]):
    """Q and K of a ``.safetensors`` or ``.npz`` file: arrays ``q`` and ``k``, ``[H, L, D]``.

    A leading batch axis of size 1 is dropped. Safetensors and uncompressed npz are mapped into
    memory; a compressed npz is read whole. A context manager: leaving it closes the file.

    Attributes:
        path: the file.
        about: the metadata of a safetensors file; `wavealign capture` writes the token grid.
        heads, tokens, head_dim: sizes of q and of k.

    Raises:
        InputError: anything else than two floating arrays of one shape, or a damaged file.
        MissingCapabilityError: safetensors isn't installed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.about: dict[str, str] = {}
        with ExitStack() as stack:
            suffix = self.path.suffix.lower()
            if suffix == ".safetensors":
                file = stack.enter_context(open_safetensors(self.path, "pt"))
                names, self.about = list(file.keys()), dict(file.metadata() or {})
                part = file.get_slice
            elif suffix == ".npz":
                arrays = stack.enter_context(NpzFile(self.path))
                names, part = arrays.names, arrays.mapped_or_read
            else:
                raise InputError(f"{self.path}: unknown kind; expected .safetensors or .npz.")
            with said_of(self.path):
                _check_names(names)
            self._q, self._k = part("q"), part("k")
            with said_of(self.path):
                for name, found in (("q", self._q), ("k", self._k)):
                    dtype = _dtype(found)
                    _check_dtype(name, dtype, dtype in _FLOATS)
                q, k = _shape(self._q), _shape(self._k)
                self._batch = len(q) == 4 and q[0] == 1
                _check_shapes(q[self._batch :], k[self._batch :])
                self._told = _told(self.about)
            self._stack = stack.pop_all()
        self.heads, self.tokens, self.head_dim = q[self._batch :]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; heads that were read stay valid."""
        self._stack.close()

    def describe(self) -> dict[str, Any]:
        """What it is, for a mask's meta."""
        known = {n: self.about[n] for n in self.about if n in ("model", "layer", "step")}
        return {"qk": self.path.name, **known, **self._told}

    def read(self, head: int) -> tuple[Tensor, Tensor]:
        """Queries and keys of a head, float ``(L, D)`` in the file's dtype."""
        index = (0, head) if self._batch else (head,)
        return _tensor(self._q[index]), _tensor(self._k[index])


def save_qk(path: Path, q: Tensor, k: Tensor, about: dict[str, str]) -> Path:
    """Write Q and K, ``[H, L, D]`` each, as safetensors, whole or not at all.

    Args:
        path: the file.
        q: queries.
        k: keys.
        about: metadata; `FileSource` understands "grid" and "text_tokens".

    Raises:
        InputError: the path can't be written.
    """
    save = require("safetensors.torch", "methods", f"{path}").save
    with whole_file(path, ".safetensors") as stream:
        stream.write(save({"q": q.contiguous().cpu(), "k": k.contiguous().cpu()}, about))
    return path


def _shape(part: Any) -> tuple[int, ...]:
    """Of an array, or of a part of a safetensors file, which may still be there."""
    return tuple(part.shape if isinstance(part, np.ndarray) else part.get_shape())


def _dtype(part: Any) -> str:
    """In safetensors' words."""
    if not isinstance(part, np.ndarray):
        return str(part.get_dtype())
    floats = (np.float16, np.float32, np.float64)
    return f"F{8 * part.dtype.itemsize}" if part.dtype in floats else str(part.dtype)


def _told(about: dict[str, str]) -> dict[str, Any]:
    """What the metadata say for a mask's meta."""
    with said_of("'about' in its metadata"):
        told = read_json(about.get("about", "{}"))
    if not isinstance(told, dict):
        raise InputError("'about' in its metadata is no JSON object.")
    return told


def _tensor(part: Any) -> Tensor:
    # A copy of an array: mapped memory is read-only.
    return part if isinstance(part, Tensor) else torch.from_numpy(np.array(part))


def _check_names(names: list[str]) -> None:
    missing = [name for name in "qk" if name not in names]
    if missing:
        held = ", ".join(f"'{name}'" for name in sorted(names)[:8]) or "nothing"
        raise InputError(f"has no '{missing[0]}'; it holds {held}; {_HINT}.")


def _check_dtype(name: str, dtype: str, floating: bool) -> None:
    if not floating:
        raise InputError(f"'{name}' is {dtype}; expected bf16, fp16, fp32 or fp64.")


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    for name, shape in (("q", q), ("k", k)):
        if len(shape) != 3 or 0 in shape:
            raise InputError(f"'{name}' has shape {list(shape)}; {_HINT}, no axis of size 0.")
    if q[2] != k[2]:
        raise InputError(
            f"q has head_dim {q[2]} and k has {k[2]}; expected the same (shapes {list(q)} and "
            f"{list(k)})."
        )
    if q != k:
        raise InputError(
            f"q has shape {list(q)} and k {list(k)}; expected the same: self-attention with as "
            "many key heads as query heads (repeat the keys of grouped queries)."
        )
