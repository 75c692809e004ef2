"""Hooks on the calls of a transformer, and the place in a run that a call has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wavealign.attention.lanes import capturing

# Told a model and the arguments of a call.
Began = Callable[[nn.Module, dict[str, Any]], None]


@dataclass(frozen=True)
class Place:
    """Of a call, all counted from 0: the run, its step, the guidance's branch, the step's call.

    Attributes:
        tokens: tells apart where tokens lie in the video; as many may lie in another grid.
    """

    run: int
    step: int
    branch: int
    call: int
    tokens: str = ""


class Watch:
    """Hooks on calls of models."""

    _hooks: list[Any]

    def watch(self, model: nn.Module, began: Began | None = None) -> None:
        """Follow a model's calls, and tell `began` the arguments of each once its place is known.

        Several models that are watched share their runs.
        """
        begin = functools.partial(self._on_call, began)
        self._hooks += [
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(self._end_call),
        ]

    def keep(self, hook: Any) -> None:
        """Let another hook go with these."""
        self._hooks.append(hook)

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def place(self) -> Place | None:
        """Of the call at hand; None before the first."""
        raise NotImplementedError

    def placed(self) -> Place:
        """Of the call at hand, which is this thread's.

        Raises:
            InputError: there is none, or another run has begun meanwhile.
        """
        raise NotImplementedError

    def restart(self) -> None:
        """Take the next call as the first of a run, and any that hasn't ended as broken off.

        Where threads have runs of their own it is this thread's.
        """
        raise NotImplementedError

    @torch.compiler.disable
    def _on_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        if self._hooks:  # Ctrl-C in `watch` may have left one behind
            self._begin_call(began, model, given, named)

    def _begin_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        raise NotImplementedError

    def _end_call(self, *_: Any) -> None:
        raise NotImplementedError


def captures(given: Any, named: Any) -> bool:
    """Whether a call's tensors are on a stream that a CUDA graph captures."""
    tensors = [x for x in (*given, *named.values()) if isinstance(x, Tensor)]
    return any(capturing(device) for device in {x.device for x in tensors})
