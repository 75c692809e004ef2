"""Record queries and keys, as attention sees them, from a diffusers video transformer.

Self-attention of the chosen blocks is watched at diffusers' own dispatch function, where
queries and keys have been normalised and turned by rotary position. Nothing is changed: the
model's output is the same, bit for bit.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from wavealign._extras import require
from wavealign.errors import InputError
from wavealign.integrations.dispatch import DISPATCH, Operation, unwrap, wrap
from wavealign.integrations.progress import Progress
from wavealign.methods.make import make_mask
from wavealign.methods.registry import find_method
from wavealign.methods.settings import Params
from wavealign.numbers import whole_numbers
from wavealign.qk.grid import TokenGrid
from wavealign.qk.sources import TensorSource, save_qk

_BLOCK_LISTS = ("blocks", "transformer_blocks", "single_transformer_blocks")
_ATTENTIONS = ("attn1", "attn")


@dataclass(frozen=True)
class Wanted:
    """What to record.

    Attributes:
        layers: transformer blocks, counted over all of the model's block lists.
        heads: which heads; None for all.
        steps: denoising steps of a run, counted from 0 (`Progress` tells them); None for all. Of
            several calls at one step (guidance) the first is recorded, of a batch its first item.
        method: record this method's mask instead of Q and K, one that looks at these.
        params: of the method.
    """

    layers: Sequence[int]
    heads: Sequence[int] | None = None
    steps: Sequence[int] | None = None
    method: str | None = None
    params: Params | None = None


@dataclass
class Capture:
    """What was recorded so far.

    Attributes:
        folder: where files go, ``step010_layer20.safetensors`` and so on; those of a second run
            are ``run1_step010_layer20.safetensors``.
        wanted: what to record.
        files: what was written.

    Raises:
        InputError: what is no number of a layer, head or step, an unknown method or one that
            doesn't look at Q and K, or parameters of another.
    """

    folder: Path
    wanted: Wanted
    files: list[Path] = field(default_factory=list)
    _progress: Progress = field(default_factory=lambda: Progress(announced=True))
    _layer: int | None = None
    _grid: TokenGrid | None = None
    _model: str = ""

    def __post_init__(self) -> None:
        wanted = self.wanted
        heads, steps = (
            None if numbers is None else whole_numbers(name, numbers)
            for name, numbers in (("heads", wanted.heads), ("steps", wanted.steps))
        )
        layers = whole_numbers("layers", wanted.layers)
        self.wanted = replace(wanted, layers=layers, heads=heads, steps=steps)
        if steps is not None and min(steps, default=-1) < 0:
            raise InputError(f"steps {list(steps)}; expected at least one, from 0.")
        if wanted.method is None:
            if wanted.params is not None:
                raise InputError("params are those of a method; give one.")
            return
        method = find_method(wanted.method)
        method.settings(wanted.params)
        if not method.needs_qk:
            raise InputError(
                f"{method.name} doesn't look at Q and K, so there is nothing to record; expected "
                "make_mask, or `wavealign mask make`."
            )

    def attach(self, transformer: nn.Module, stack: ExitStack) -> None:
        """Watch a transformer until the stack is closed.

        Raises:
            InputError: no diffusers video transformer, or one without such layers or heads.
        """
        attentions = self_attentions(transformer)
        self._model = type(transformer).__name__
        _within("layers", self.wanted.layers, len(attentions), self._model)
        chosen = [attentions[layer] for layer in self.wanted.layers]
        for layer, attention in zip(self.wanted.layers, chosen, strict=True):
            if self.wanted.heads is not None and hasattr(attention, "heads"):
                _within("heads", self.wanted.heads, attention.heads, f"layer {layer}")
        self._progress.watch(transformer, self._begin_call)
        stack.callback(self._progress.close)
        for layer, attention in zip(self.wanted.layers, chosen, strict=True):
            enter = functools.partial(self._enter, layer)
            stack.callback(attention.register_forward_pre_hook(enter).remove)
            stack.callback(attention.register_forward_hook(self._leave).remove)
        sites = [(a.processor, getattr(a.processor, "_site", None)) for a in chosen]
        own = [site.original if site is not None else processor for processor, site in sites]
        for module in {sys.modules[type(processor).__module__] for processor in own}:
            self._watch(module, stack)

    def _watch(self, module: ModuleType, stack: ExitStack) -> None:
        if not hasattr(module, DISPATCH):
            raise InputError(
                f"{self._model}: its attention doesn't go through diffusers' {DISPATCH} "
                "(diffusers 0.36 or newer needed)."
            )

        def watcher(real: Operation) -> Operation:
            def watch(query: Tensor, key: Tensor, *arguments: Any, **options: Any) -> Any:
                # Cross-attention to text or to an image has keys of another length.
                if self._layer is not None and query.shape == key.shape:
                    layer, self._layer = self._layer, None
                    self._record(layer, query, key)
                return real(query, key, *arguments, **options)

            return watch

        wrap(module, watcher)
        stack.callback(unwrap, module, watcher)

    def _begin_call(self, model: nn.Module, given: dict[str, Any]) -> None:
        self._grid = grid_of(model, given)

    def _enter(self, layer: int, *_: Any) -> None:
        steps, place = self.wanted.steps, self._progress.place
        if place is not None and place.call == 0 and (steps is None or place.step in steps):
            self._layer = layer

    def _leave(self, *_: Any) -> None:
        self._layer = None

    def _record(self, layer: int, query: Tensor, key: Tensor) -> None:
        """Write one layer at one step; tensors come as ``[batch, tokens, heads, head_dim]``."""
        available = query.shape[2]
        heads = list(self.wanted.heads if self.wanted.heads is not None else range(available))
        _within("heads", heads, available, f"layer {layer}")
        index = torch.tensor(heads, device=query.device)
        q, k = (x[0].detach().index_select(1, index).transpose(0, 1) for x in (query, key))
        place = self._progress.place
        assert place is not None
        run = f"run{place.run}_" if place.run else ""
        name = f"{run}step{place.step:03d}_layer{layer:02d}"
        about = {
            "model": self._model, "layer": str(layer), "step": str(place.step),
            "run": str(place.run), "heads": ",".join(map(str, heads)),
        }  # fmt: skip
        grid, text = self._grid, 0
        if grid is not None and grid.tokens <= q.shape[1]:
            text = q.shape[1] - grid.tokens
            about.update(grid=str(grid), text_tokens=str(text))
        else:
            grid = None
        if self.wanted.method is None:
            self.files.append(save_qk(self.folder / f"{name}.safetensors", q, k, about))
            return
        from wavealign.masks import save_mask

        source = TensorSource(q, k, name)
        mask = make_mask(
            self.wanted.method, source, self.wanted.params, grid=grid, text_tokens=text,
            device=str(q.device),
        )  # fmt: skip
        path = self.folder / f"{name}.npz"
        save_mask(path, replace(mask, meta={**mask.meta, **about, "heads": heads}))
        self.files.append(path)


@contextmanager
def capture_qk(transformer: nn.Module, folder: str | Path, wanted: Wanted) -> Iterator[Capture]:
    """Record while the block runs.

    Args:
        transformer: a diffusers video transformer, e.g. ``pipe.transformer``.
        folder: an existing folder to write to.
        wanted: what to record.

    Raises:
        InputError: see `Capture` and `Capture.attach`; or the folder doesn't exist.
    """
    with ExitStack() as stack:
        capture = Capture(_folder(folder), wanted)
        capture.attach(transformer, stack)
        yield capture


@contextmanager
def capture_first(folder: str | Path, wanted: Wanted) -> Iterator[Capture]:
    """Record the diffusers transformer that is called, whoever makes it.

    Others of its class are recorded, too, their steps counted together: Wan2.2 has two. A call of
    one of another class is refused.

    Args:
        folder: an existing folder to write to.
        wanted: what to record.

    Raises:
        InputError: see `Capture` and `Capture.attach`; or the folder doesn't exist.
    """
    diffusers = require("diffusers", "diffusers", "wavealign capture")
    with ExitStack() as stack:
        capture = Capture(_folder(folder), wanted)
        attached: list[nn.Module] = []

        def call(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            known = any(module is part for model in attached for part in model.modules())
            if not known and any(hasattr(module, name) for name in _BLOCK_LISTS):
                if attached and type(module) is not type(attached[0]):
                    raise InputError(
                        f"{type(module).__name__} is called beside {type(attached[0]).__name__}; "
                        "expected transformers of one class. Call `capture_qk` on the one that "
                        "you want."
                    )
                capture.attach(module, stack)
                attached.append(module)
            return nn.Module.__call__(module, *arguments, **options)

        # A hook of all modules would come too late to see its own call's arguments.
        diffusers.ModelMixin.__call__ = call
        stack.callback(delattr, diffusers.ModelMixin, "__call__")
        yield capture


def self_attentions(transformer: nn.Module) -> list[Any]:
    """The self-attention of every block, block list by block list.

    Raises:
        InputError: no blocks with attention.
    """
    found = []
    for blocks in _BLOCK_LISTS:
        for block in getattr(transformer, blocks, ()):
            attentions = [getattr(block, name, None) for name in _ATTENTIONS]
            found += [a for a in attentions if hasattr(a, "processor")][:1]
    if not found:
        raise InputError(
            f"{type(transformer).__name__}: no transformer blocks with attention found; expected "
            "a diffusers video transformer such as WanTransformer3DModel."
        )
    return found


def _within(name: str, numbers: Sequence[int], count: int, of: str) -> None:
    if not numbers or max(numbers) >= count or min(numbers) < 0:
        raise InputError(f"{name} {list(numbers)}: {of} has {name} 0 to {count - 1}.")


def _folder(folder: str | Path) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder.")
    return path


def grid_of(model: nn.Module, given: dict[str, Any]) -> TokenGrid | None:
    """The token grid of a call: as it says, or of latents ``[B, channels, frames, height, width]``.

    Args:
        model: a transformer.
        given: the call's arguments.

    Returns:
        None where it isn't known, where coordinates say more, or frames of the past are in front.
    """
    if given.get("video_coords") is not None or "Framepack" in type(model).__name__:
        return None
    sizes = [given.get(name) for name in ("num_frames", "height", "width")]
    if all(isinstance(size, int) for size in sizes):
        return TokenGrid(*sizes)  # type: ignore[arg-type]
    latents, config = given.get("hidden_states"), getattr(model, "config", None)
    patch = getattr(config, "patch_size", None)
    if not isinstance(latents, Tensor) or latents.ndim != 5 or patch is None:
        return None
    if isinstance(patch, int):
        patch = (getattr(config, "patch_size_t", 1) or 1, patch, patch)
    frames, height, width = (n // p for n, p in zip(latents.shape[2:], patch, strict=True))
    return TokenGrid(frames, height, width)
