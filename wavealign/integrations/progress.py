"""Where in a run a call of a transformer is: `Progress` tells run, step and branch.

A transformer is only called, so this is told from what it is called with. A lower timestep is the
next step, a higher one another run. At an equal one the text tells branches of the guidance apart:

- a text that this step didn't have yet, or at the first step the same latents again, is a branch;
- else latents that have hardly moved, and a timestep of 16 bits or a whole one, are the next step,
  whose timestep was rounded to the same value; after the first step 16 bits alone are enough;
- else, at the first step, latents far from those are another run: the one before was broken off.

What this leaves open is refused, as is a first step of 16 bits that comes again with latents far
from its own, unless the run's beginning was announced.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wavealign._locks import ForkSafeLock
from wavealign.attention.lanes import capturing
from wavealign.errors import InputError

# Told a model and the arguments of a call.
Began = Callable[[nn.Module, dict[str, Any]], None]
_SHORT = (torch.bfloat16, torch.float16)
_TEXT = ("encoder_", "pooled_", "image_embeds")
_MOST_ALIKE = 4  # calls of a first step with one text and the same latents
# Between steps of one rounded timestep latents move by 0.01 of their norm (0.1 where a scheduler
# adds noise); those of two runs are 1.4 apart, less where both begin late, from one clip.
_NEAR, _FAR = 0.05, 0.5
_SAMPLED = 2**16  # elements of latents that are compared
_ANEW = (
    "a new run: restart(transformer) under a session, else disable and enable it again, or begin "
    "another capture"
)
_beginning = ForkSafeLock()


@dataclass(frozen=True)
class Place:
    """Of a call, all counted from 0: the run, its step, the guidance's branch, the step's call."""

    run: int
    step: int
    branch: int
    call: int


@dataclass(frozen=True, eq=False)
class _Latents:
    """What is known of a call's latents: a digest of all, and some of them on the host."""

    digest: str
    sample: Tensor

    @classmethod
    def of(cls, latents: Any, whole: bool) -> _Latents:
        """Of a call's, with a digest only where ``whole``."""
        flat = latents.detach().reshape(-1) if isinstance(latents, Tensor) else torch.empty(0)
        sample = flat[:: max(1, len(flat) // _SAMPLED)].to("cpu", torch.float32)
        return cls(_digest(latents) if whole else "", sample)

    def apart(self, other: _Latents) -> float:
        """Their distance, as a share of the larger norm; infinite where they can't be compared."""
        if self.sample.shape != other.sample.shape or not len(self.sample):
            return math.inf
        largest = torch.maximum(self.sample.norm(), other.sample.norm())
        return float((self.sample - other.sample).norm() / largest)


class Watch:
    """Hooks on calls of models."""

    _hooks: list[Any]

    def watch(self, model: nn.Module, began: Began | None = None) -> None:
        """Follow a model's calls, and tell `began` the arguments of each once its place is known.

        Several models that are watched share their runs.
        """
        begin = functools.partial(self._begin_call, began)
        self._hooks += [
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(self._end_call),
        ]

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    @property
    def place(self) -> Place | None:
        """Of the call at hand; None before the first."""
        raise NotImplementedError

    def _begin_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        raise NotImplementedError

    def _end_call(self, *_: Any) -> None:
        raise NotImplementedError


@dataclass
class Progress(Watch):
    """The place of the call at hand, of runs that are one after the other.

    A thread's call is refused while another's hasn't ended.

    Attributes:
        steps: of a run, where that is known.
        announced: the next call, or the first of this run, was said to begin a run.
        place: None before the first call.
        interrupted: the call before this one didn't end.
        timestep: of this step.
    """

    steps: int | None = None
    announced: bool = False
    place: Place | None = None
    interrupted: bool = False
    timestep: float = 0.0
    _run: int = -1
    _running: bool = False  # a call that began and didn't end
    _thread: int = 0  # that began it
    _first: float = 0.0
    # A branch is a text, and which call with it of a step; with the latents of its last call.
    _branches: dict[tuple[str, int], _Latents] = field(default_factory=dict)
    _called: list[tuple[str, int]] = field(default_factory=list)
    _left: tuple[dict[tuple[str, int], _Latents], float] = ({}, 0.0)  # of the run before
    _hooks: list[Any] = field(default_factory=list, repr=False)

    def announce(self) -> None:
        """Take the next call as the first of a run, and any that hasn't ended as broken off."""
        self.place, self.announced, self._running = None, True, False

    def begin(self, given: dict[str, Any]) -> None:
        """Find the place of a call.

        Raises:
            InputError: no timestep, or a place that can't be known.
        """
        timestep, latents = given.get("timestep"), given.get("hidden_states")
        if timestep is None:
            raise InputError("the transformer was called without a timestep, which tells steps.")
        # Of tokens that are given (image to video) it is 0 all along.
        value = float(timestep.max() if isinstance(timestep, Tensor) else timestep)
        text = _digest(*(given[name] for name in sorted(given) if name.startswith(_TEXT)))
        early = self.place is None or self.place.step == 0 or value > self.timestep
        self._move(value, text, getattr(timestep, "dtype", None), _Latents.of(latents, early))

    def _move(self, value: float, text: str, dtype: torch.dtype | None, latents: _Latents) -> None:
        here, before = self.place, self.timestep
        if here is None or (self.interrupted and here.step == here.call == 0):
            return self._start(value, text, latents)
        if self.interrupted and value == before and self._called[-1][0] == text:
            self.place = replace(here)  # the call that was broken off, again
            return None
        if value > before:
            ended = self.steps is not None and here.step + 1 >= self.steps
            if not ended and (here.step == 0 or (self.steps is not None and value < self._first)):
                raise InputError(
                    f"timestep {value:g} after {before:g}, in a run that began at {self._first:g}; "
                    f"expected timesteps that fall from step to step, or {_ANEW}."
                )
            return self._start(value, text, latents)
        if value < before:
            return self._step(value, text, latents)
        times = Counter(t for t, _ in self._called)
        text_again = times[text]
        branch = (text, text_again)
        if not text_again or branch in self._branches:
            return self._enter(here.step, branch, latents)
        known, short = self._branches[text, 0], dtype in _SHORT
        rounded = short or (dtype is not None and not dtype.is_floating_point)
        same, apart = latents.digest == known.digest, latents.apart(known)
        if here.step == 0 and same:
            # Guidance passes the same latents, but hardly to each of several texts twice.
            alone = len(times) == 1
            all_again = all(count > 1 or t == text for t, count in times.items())
            unclear = all_again and (short if alone else rounded)
            if not unclear and text_again < _MOST_ALIKE:
                return self._enter(0, branch, latents)
            moves_on = unclear and alone and self.announced
        elif here.step == 0:
            if apart > _FAR and not short:
                return self._start(value, text, latents)
            moves_on = (rounded and apart < _NEAR) or (short and self.announced)
        else:
            moves_on = short or (rounded and 0 < apart < _NEAR)
        if moves_on:
            return self._step(value, text, latents)
        if here.step == 0 and rounded:
            raise InputError(
                f"timestep {value:g} again with the same text: the second step, rounded to the "
                "first's timestep, or another run. Expected timesteps in float32; or, said "
                f"before each run, {_ANEW}."
            )
        raise InputError(
            f"call {here.call + 2} of the transformer at timestep {value:g}, step {here.step}, "
            "with a text that had its call; expected a timestep for each step, a scheduler "
            f"that evaluates it once, and the first step's guidance, or {_ANEW}."
        )

    def _start(self, value: float, text: str, latents: _Latents) -> None:
        self._left = self._branches, self.timestep
        self._run, self._first, self.timestep = self._run + 1, value, value
        self._branches, self._called = {}, []
        self.announced = self.announced and self.place is None
        self._enter(0, (text, 0), latents)

    def _step(self, value: float, text: str, latents: _Latents) -> None:
        assert self.place is not None
        step = self.place.step + 1
        if self.steps is not None and step >= self.steps:
            raise InputError(
                f"timestep {value:g} is step {step} of a run of {self.steps} steps (from 0); "
                f"expected as many as enable_session(steps=...) says, or {_ANEW}."
            )
        if step == 1:
            self._refuse_two_runs(value, text, latents)
        self._called, self.timestep = [], value
        self._enter(step, (text, 0), latents)

    def _refuse_two_runs(self, value: float, text: str, latents: _Latents) -> None:
        """Raise where the run that this one seemed to follow goes on: its latents are at hand."""
        left, timestep = self._left
        own, other = self._branches.get((text, 0)), left.get((text, 0))
        if other is None or value >= timestep:
            return
        apart = latents.apart(other)
        if apart < _FAR and (own is None or apart < latents.apart(own)):
            raise InputError(
                f"timestep {value:g} goes on with the run before this one: two runs take turns "
                "here, and their steps can't be told apart. Expected a thread for each run, and "
                "under a session a transformer for each."
            )

    def _enter(self, step: int, branch: tuple[str, int], latents: _Latents) -> None:
        self._branches[branch] = latents
        number = list(self._branches).index(branch)
        self.place = Place(self._run, step, number, len(self._called))
        self._called.append(branch)

    @torch.compiler.disable
    def _begin_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        if _captures(given, named):
            raise InputError(
                "the transformer is captured in a CUDA graph, and steps are counted on the host; "
                "expected a call outside of a capture."
            )
        with _beginning.lock:
            self._refuse_others()
            before = self._running, self._thread
            self._running, self._thread = True, threading.get_ident()
        try:
            self.interrupted = before[0]
            bound = inspect.signature(type(model).forward).bind_partial(model, *given, **named)
            self.begin(bound.arguments)
            if began is not None:
                began(model, bound.arguments)
        except BaseException:
            self._running, self._thread = before
            raise

    def _refuse_others(self) -> None:
        others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        if self._running and self._thread in others:
            raise InputError(
                "another thread's call of this transformer hasn't ended, and the steps of one run "
                "are counted; expected a transformer for each run, or, if that call was broken "
                f"off, {_ANEW}."
            )

    def _end_call(self, *_: Any) -> None:
        self._running = False


class ThreadProgress(Watch):
    """A `Progress` for each thread: threads that share a model have runs of their own.

    Calls that a CUDA graph captures have no place. A copy, pickled or not, watches the copied
    model, and has no runs.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._hooks = []

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadProgress, (), self._hooks

    def __setstate__(self, hooks: list[Any]) -> None:
        self._hooks = hooks

    @property
    def place(self) -> Place | None:
        """Of this thread's call at hand; None before its first."""
        return self._here().place

    def _here(self) -> Progress:
        own: dict[str, Progress] = self._own.__dict__
        return own.setdefault("progress", Progress())

    @torch.compiler.disable
    def _begin_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        if not _captures(given, named):
            self._here()._begin_call(began, model, given, named)

    @torch.compiler.disable
    def _end_call(self, *_: Any) -> None:
        self._here()._end_call()


def _captures(given: Any, named: Any) -> bool:
    tensors = [x for x in (*given, *named.values()) if isinstance(x, Tensor)]
    return any(capturing(device) for device in {x.device for x in tensors})


def _digest(*values: Any) -> str:
    """What tells values apart, those of tensors and of lists of them; the host waits for them."""
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, Tensor):
            found.update(f"{tuple(value.shape)} {value.dtype}".encode())
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(data.numpy().data)
        else:
            parts = _digest(*value) if isinstance(value, list | tuple) else repr(value)
            found.update(parts.encode())
    return found.hexdigest()
