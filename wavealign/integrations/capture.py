"""Record queries and keys, as attention sees them, from a diffusers video transformer.

Self-attention of the chosen blocks is watched at diffusers' own dispatch function, where
queries and keys have been normalised and turned by rotary position. Nothing is changed: the
model's output is the same, bit for bit.
"""

from __future__ import annotations

import functools
import inspect
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
from wavealign.integrations.models import BLOCK_LISTS, MODELS, self_attentions, token_grid
from wavealign.integrations.padding import Padding
from wavealign.integrations.progress import Progress
from wavealign.methods.make import make_mask
from wavealign.methods.registry import find_method
from wavealign.methods.settings import Params
from wavealign.qk.grid import TokenGrid
from wavealign.qk.sources import TensorSource, save_qk


@dataclass(frozen=True)
class Wanted:
    """What to record.

    Attributes:
        layers: transformer blocks, counted over all of the model's block lists.
        heads: which heads; None for all.
        steps: denoising steps of a run, counted from 0 (`Progress` tells them); None for all. Of
            several calls at one step (guidance) the first is recorded, of a batch its first item.
        method: record this method's mask instead of Q and K.
        params: of the method.
    """

    layers: Sequence[int]
    heads: Sequence[int] | None = None
    steps: Sequence[int] | None = None
    method: str | None = None
    params: Params | None = None


@dataclass(frozen=True)
class _Attends:
    """A call of a self-attention that is to be recorded.

    Attributes:
        layer: which.
        tokens: of the sequence's first item that count.
        text_tokens: of these, at the end; None where nobody knows where the text is.
    """

    layer: int
    tokens: int | None
    text_tokens: int | None

    @classmethod
    def make(cls, model: str, layer: int, given: dict[str, Any]) -> _Attends:
        """Of the arguments of diffusers' attention modules.

        Args:
            model: name of the transformer's class.
            layer: which.
            given: the arguments by name.

        Raises:
            InputError: a mask of padding that isn't behind everything else.
        """
        hidden, text = given["hidden_states"], given.get("encoder_hidden_states")
        batch, video = hidden.shape[:2]
        if text is None:
            return cls(layer, None, 0)
        if model not in MODELS:
            return cls(layer, None, None)
        mask = given.get("attention_mask")
        tokens = Padding().lengths(mask, batch, video, text.shape[1]).tokens[0]
        return cls(layer, tokens, tokens - video)


@dataclass
class Capture:
    """What was recorded so far.

    Attributes:
        folder: where files go, ``step010_layer20.safetensors`` and so on; those of a second run
            are ``run1_step010_layer20.safetensors``.
        wanted: what to record.
        files: what was written.
    """

    folder: Path
    wanted: Wanted
    files: list[Path] = field(default_factory=list)
    _progress: Progress = field(default_factory=lambda: Progress(announced=True))
    _attends: _Attends | None = None
    _grid: TokenGrid | None = None
    _model: str = ""

    def attach(self, transformer: nn.Module, stack: ExitStack) -> None:
        """Watch a transformer until the stack is closed.

        Raises:
            InputError: no diffusers video transformer, or one without such layers or heads.
        """
        attentions = self_attentions(transformer)
        self._model = type(transformer).__name__
        wrong = [layer for layer in self.wanted.layers if not 0 <= layer < len(attentions)]
        if self.wanted.method is not None:
            find_method(self.wanted.method).settings(self.wanted.params)
        if wrong or not self.wanted.layers:
            raise InputError(
                f"layers {list(self.wanted.layers)}: {self._model} has layers 0 to "
                f"{len(attentions) - 1}."
            )
        self._progress.watch(transformer, self._begin_call)
        stack.callback(self._progress.close)
        chosen = [attentions[layer] for layer in self.wanted.layers]
        for layer, attention in zip(self.wanted.layers, chosen, strict=True):
            enter = functools.partial(self._enter, layer)
            stack.callback(attention.register_forward_pre_hook(enter, with_kwargs=True).remove)
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
                if self._attends is not None and query.shape == key.shape:
                    attends, self._attends = self._attends, None
                    self._record(attends, query, key)
                return real(query, key, *arguments, **options)

            return watch

        wrap(module, watcher)
        stack.callback(unwrap, module, watcher)

    def _begin_call(self, model: nn.Module, given: dict[str, Any]) -> None:
        self._grid = token_grid(model, given)

    def _enter(self, layer: int, attention: nn.Module, given: Any, named: Any) -> None:
        steps, place = self.wanted.steps, self._progress.place
        if place is not None and place.call == 0 and (steps is None or place.step in steps):
            bound = inspect.signature(type(attention).forward)
            arguments = bound.bind_partial(attention, *given, **named).arguments
            self._attends = _Attends.make(self._model, layer, arguments)

    def _leave(self, *_: Any) -> None:
        self._attends = None

    def _record(self, attends: _Attends, query: Tensor, key: Tensor) -> None:
        """Write one layer at one step; tensors come as ``[batch, tokens, heads, head_dim]``."""
        layer, available = attends.layer, query.shape[2]
        heads = list(self.wanted.heads if self.wanted.heads is not None else range(available))
        if not heads or max(heads) >= available or min(heads) < 0:
            raise InputError(f"heads {heads}: layer {layer} has heads 0 to {available - 1}.")
        index = torch.tensor(heads, device=query.device)
        q, k = (
            x[0, : attends.tokens].detach().index_select(1, index).transpose(0, 1)
            for x in (query, key)
        )
        place = self._progress.place
        assert place is not None
        run = f"run{place.run}_" if place.run else ""
        name = f"{run}step{place.step:03d}_layer{layer:02d}"
        about = {
            "model": self._model, "layer": str(layer), "step": str(place.step),
            "run": str(place.run), "heads": ",".join(map(str, heads)),
        }  # fmt: skip
        grid, text = self._grid, attends.text_tokens
        if text is None or (grid is not None and grid.tokens + text != q.shape[1]):
            grid = None  # other tokens are in between, or the text comes first
        if text or grid is not None:
            about.update(text_tokens=str(text))
        if grid is not None:
            about.update(grid=str(grid))
        if self.wanted.method is None:
            self.files.append(save_qk(self.folder / f"{name}.safetensors", q, k, about))
            return
        from wavealign.masks import save_mask

        source = TensorSource(q, k, name)
        mask = make_mask(
            self.wanted.method, source, self.wanted.params, grid=grid, text_tokens=text or 0,
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
        InputError: see `Capture.attach`; or the folder doesn't exist.
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
        InputError: see `Capture.attach`; or the folder doesn't exist.
    """
    diffusers = require("diffusers", "diffusers", "wavealign capture")
    with ExitStack() as stack:
        capture = Capture(_folder(folder), wanted)
        attached: list[nn.Module] = []

        def call(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            known = any(module is part for model in attached for part in model.modules())
            if not known and any(hasattr(module, name) for name in BLOCK_LISTS):
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


def _folder(folder: str | Path) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder.")
    return path
