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
import inspect
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
from wavealign.integrations.fingerprints import Latents, digest_places, digest_text

# Told a model and the arguments of a call.
Began = Callable[[nn.Module, dict[str, Any]], None]
_SHORT = (torch.bfloat16, torch.float16)
_MOST_ALIKE = 4  # calls of a first step with one text and the same latents
# Between steps of one rounded timestep latents move by 0.01 of their norm (0.1 where a scheduler
# adds noise); those of two runs are 1.4 apart, less where both begin late, from one clip.
_NEAR, _FAR = 0.05, 0.5
_ANEW = "a new run: restart(transformer), or another capture"
_beginning = ForkSafeLock()


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


_Called = tuple[tuple[str, int], Latents]
"""A branch, which is a text and which call with it of a step, and the latents of its last call."""


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

    def keep(self, hook: Any) -> None:
        """Let another hook go with these."""
        self._hooks.append(hook)

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    @property
    def place(self) -> Place | None:
        """Of the call at hand; None before the first."""
        raise NotImplementedError

    def restart(self) -> None:
        """Take the next call as the first of a run, and any that hasn't ended as broken off.

        Where threads have runs of their own it is this thread's.
        """
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
    _branches: dict[tuple[str, int], Latents] = field(default_factory=dict)
    _called: list[tuple[str, int]] = field(default_factory=list)
    _left: tuple[dict[tuple[str, int], Latents], float] = ({}, 0.0)  # of the run before
    _hooks: list[Any] = field(default_factory=list, repr=False)

    def restart(self) -> None:
        """See `Watch.restart`."""
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
        text = digest_text(given)
        early = self.place is None or self.place.step == 0 or value > self.timestep
        self._move(value, text, getattr(timestep, "dtype", None), Latents.of(latents, early))
        assert self.place is not None
        self.place = replace(self.place, tokens=digest_places(given))  # another for each call

    def _move(self, value: float, text: str, dtype: torch.dtype | None, latents: Latents) -> None:
        here, before = self.place, self.timestep
        if here is None or (self.interrupted and here.step == here.call == 0):
            return self._start(value, text, latents)
        if self.interrupted and value == before and self._called[-1][0] == text:
            return None  # the call that was broken off, again
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
                return self._start(value, text, latents, *self._branches.items())
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

    def _start(self, value: float, text: str, latents: Latents, *mine: _Called) -> None:
        self._left = self._branches, self.timestep
        self._run, self._first, self.timestep = self._run + 1, value, value
        # Another text of this run may have passed for a branch of the one before.
        self._branches = {b: last for b, last in mine if last.digest == latents.digest}
        self._called = list(self._branches)
        self.announced = self.announced and self.place is None
        self._enter(0, (text, 0), latents)

    def _step(self, value: float, text: str, latents: Latents) -> None:
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

    def _refuse_two_runs(self, value: float, text: str, latents: Latents) -> None:
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

    def _enter(self, step: int, branch: tuple[str, int], latents: Latents) -> None:
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

    def restart(self) -> None:
        """See `Watch.restart`."""
        self._here().restart()

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
