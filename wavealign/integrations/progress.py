"""Where in a run a call of a transformer is: `Progress` tells run, step and branch.

A transformer is only called, so this is told from what it is called with. A lower timestep is the
next step, a higher one another run. At an equal one the text tells branches of the guidance apart:

- a text that this step didn't have yet, or at the first step the same latents again, is a branch;
- else, at the first step, other latents are another run: the one before was broken off;
- else a timestep of 16 bits is the next step, whose timestep was rounded to the same value.

After a call that was broken off, the same text is that call again; at the first step another one is
another run. What this leaves open is refused, as is a first step whose timestep of 16 bits
comes again, unless the run's beginning was announced, and a run that another thread goes on with.
A call that is refused leaves everything as it was.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wavealign._locks import ForkSafeLock
from wavealign.attention.lanes import capturing
from wavealign.errors import InputError

# Told a model and the arguments of a call.
Began = Callable[[nn.Module, dict[str, Any]], None]
_ROUNDED = (torch.bfloat16, torch.float16)
_TEXT = ("encoder_", "pooled_", "image_embeds")
_MOST_ALIKE = 4  # calls of a first step with one text and the same latents
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

    @torch.compiler.disable
    def _on_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        if self._hooks:  # Ctrl-C in `watch` may have left one behind
            self._begin_call(began, model, given, named)

    def _begin_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        raise NotImplementedError

    def _end_call(self, *_: Any) -> None:
        raise NotImplementedError


@dataclass
class Progress(Watch):
    """The place of the call at hand, of runs that are one after the other.

    A thread's call is refused while another's hasn't ended, and in the middle of another's run.

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
    _thread: int = 0  # of the call and of the run
    _first: float = 0.0
    # A branch is a text, and which call with it of a step; with the latents of the first step.
    _branches: dict[tuple[str, int], str] = field(default_factory=dict)
    _called: tuple[tuple[str, int], ...] = ()
    # Threads in whose run another one began its own, and the first timestep of theirs.
    _cut_off: dict[int, float] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list, repr=False)

    def restart(self) -> None:
        """Take the next call, of any thread, as the first of a run."""
        with _beginning.lock:
            self._cut_off = self._now_cut_off(vars(self))
            self.place, self.announced, self._running = None, True, False

    def placed(self) -> Place:
        """See `Watch.placed`.

        Raises:
            InputError: see there.
        """
        if self.place is None or self._thread != threading.get_ident():
            raise InputError(
                "an attention layer was called outside its transformer, or another run has begun "
                "while it was; expected one run at a time."
            )
        return self.place

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
        rounded = isinstance(timestep, Tensor) and timestep.dtype in _ROUNDED
        early = self.place is None or self.place.step == 0 or value > self.timestep
        self._move(value, text, rounded, _digest(latents) if early else "")

    def _move(self, value: float, text: str, rounded: bool, latents: str) -> None:
        here, before = self.place, self.timestep
        if here is None:
            return self._start(value, text, latents)
        if self.interrupted:
            again = value == before and self._called[-1][0] == text
            again = again and (here.step > 0 or latents == self._branches[self._called[-1]])
            if here.step == 0 and (here.call == 0 or (value >= before and not again)):
                return self._start(value, text, latents)
            if again:
                return None
        branch = (text, sum(t == text for t, _ in self._called))
        if value > before:
            ended = self.steps is not None and here.step + 1 >= self.steps
            if not ended and (here.step == 0 or (self.steps is not None and value < self._first)):
                raise InputError(
                    f"timestep {value:g} after {before:g}, in a run that began at {self._first:g}; "
                    f"expected timesteps that fall from step to step, or {_ANEW}."
                )
            return self._start(value, text, latents)
        if value < before:
            return self._step(value, text)
        # Guidance passes the same latents. Without another text between, equal ones say little.
        alike = here.step == 0 and latents == self._branches.get((text, 0))
        alike = alike and (not rounded or here.call > 0)
        if here.step == 0 and branch[1] and not alike:
            if not rounded:
                return self._start(value, text, latents)
            if not self.announced:
                raise InputError(
                    f"timestep {value:g} again with the same text: the second step, rounded to the "
                    "first's timestep, or another run. Expected timesteps in float32; or, said "
                    f"before each run, {_ANEW}."
                )
        elif not branch[1] or branch in self._branches or (alike and branch[1] < _MOST_ALIKE):
            return self._enter(here.step, branch, latents)
        elif not rounded or alike:
            raise InputError(
                f"call {here.call + 2} of the transformer at timestep {value:g}, step {here.step}, "
                "with a text that had its call; expected a timestep for each step, a scheduler "
                f"that evaluates it once, and the first step's guidance, or {_ANEW}."
            )
        return self._step(value, text)

    def _start(self, value: float, text: str, latents: str) -> None:
        self._run, self._first, self.timestep = self._run + 1, value, value
        self._branches, self._called = {}, ()
        self.announced = self.announced and self.place is None
        self._enter(0, (text, 0), latents)

    def _step(self, value: float, text: str) -> None:
        assert self.place is not None
        step = self.place.step + 1
        if self.steps is not None and step >= self.steps:
            raise InputError(
                f"timestep {value:g} is step {step} of a run of {self.steps} steps (from 0); "
                f"expected as many as enable_session(steps=...) says, or {_ANEW}."
            )
        self._called, self.timestep = (), value
        self._enter(step, (text, 0), "")

    def _enter(self, step: int, branch: tuple[str, int], latents: str) -> None:
        if branch not in self._branches:
            self._branches = {**self._branches, branch: latents}
        number = list(self._branches).index(branch)
        self.place = Place(self._run, step, number, len(self._called))
        self._called = (*self._called, branch)

    def _begin_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        if _captures(given, named):
            raise InputError(
                "the transformer is captured in a CUDA graph, and steps are counted on the host; "
                "expected a call outside of a capture."
            )
        before: dict[str, Any] = {}
        try:
            with _beginning.lock:
                self._refuse_others()
                before = vars(self).copy()
                self._running, self._thread = True, threading.get_ident()
            self.interrupted = before["_running"]
            bound = inspect.signature(type(model).forward).bind_partial(model, *given, **named)
            self.begin(bound.arguments)
            began_run = self._run != before["_run"]
            cut_off = self.timestep < self._cut_off.get(self._thread, -math.inf)
            if cut_off or (self._thread != before["_thread"] and not began_run):
                raise InputError(
                    f"timestep {self.timestep:g} in the middle of a run, and another thread has "
                    "begun one; expected all calls of a run from one thread, and a transformer for "
                    f"each run that goes on at the same time, or {_ANEW}."
                )
            if began_run:
                self._cut_off = self._now_cut_off(before)
            if began is not None:
                began(model, bound.arguments)
        except BaseException:
            with _beginning.lock:
                if self._running and self._thread == threading.get_ident():
                    vars(self).update(before)
            raise

    def _now_cut_off(self, before: dict[str, Any]) -> dict[int, float]:
        """Who is, with a run that this thread begins after such a state."""
        here, found = before["place"], dict(before["_cut_off"])
        last = here is not None and self.steps is not None and here.step + 1 >= self.steps
        if here is not None and not (last and len(before["_called"]) >= len(before["_branches"])):
            found[before["_thread"]] = before["_first"]
        found.pop(threading.get_ident(), None)
        return found

    def _refuse_others(self) -> None:
        others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        if self._running and self._thread in others:
            raise InputError(
                "another thread's call of this transformer hasn't ended, and the steps of one run "
                "are counted; expected a transformer for each run, or, if that call was broken "
                f"off, {_ANEW}."
            )

    def _end_call(self, *_: Any) -> None:
        with _beginning.lock:
            self._running = self._running and self._thread != threading.get_ident()


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

    def placed(self) -> Place:
        """See `Watch.placed`."""
        return self._here().placed()

    def _here(self) -> Progress:
        own: dict[str, Progress] = self._own.__dict__
        return own.setdefault("progress", Progress())

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
