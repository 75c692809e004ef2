"""Where in a run a call of a transformer is: `Progress` tells run, step and branch.

A transformer is only called, so this is told from what it is called with. A lower timestep is the
next step, a higher one another run. At an equal one the text tells branches of the guidance apart:

- a text that this step didn't have yet, or at the first step the same latents again, is a branch;
- else latents that have hardly moved, and a timestep of 16 bits or a whole one, are the next step,
  whose timestep was rounded to the same value; after the first step 16 bits alone are enough;
- else, at the first step, latents far from those are another run: the one before was broken off.

After a call that was broken off, the same text is that call again; at the first step another one is
another run. What this leaves open is refused, as is a first step of 16 bits that comes again with
latents far from its own, unless the run's beginning was announced, and a run that another thread
goes on with. A call that is refused leaves everything as it was.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wavealign._locks import ForkSafeLock
from wavealign.errors import InputError
from wavealign.integrations.fingerprints import Latents, digest_places, digest_text
from wavealign.integrations.watch import Began, Place, Watch, captures

_SHORT = (torch.bfloat16, torch.float16)
_MOST_ALIKE = 4  # calls of a first step with one text and the same latents
# Between steps of one rounded timestep latents move by 0.01 of their norm (0.1 where a scheduler
# adds noise); those of two runs are 1.4 apart, less where both begin late, from one clip.
_NEAR, _FAR = 0.05, 0.5
_ANEW = "a new run: restart(transformer), or another capture"
_beginning = ForkSafeLock()


_Called = tuple[tuple[str, int], Latents]
"""A branch, which is a text and which call with it of a step, and the latents of its last call."""


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
    _branches: dict[tuple[str, int], Latents] = field(default_factory=dict)
    _called: tuple[tuple[str, int], ...] = ()
    _left: tuple[dict[tuple[str, int], Latents], float] = ({}, 0.0)  # of the run before
    # Threads in whose run another one began its own, and the first timestep of theirs.
    _cut_off: dict[int, float] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list, repr=False)

    def restart(self) -> None:
        """See `Watch.restart`."""
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
        text, tokens = digest_text(given), digest_places(given)
        early = self.place is None or self.place.step == 0 or value > self.timestep
        known = Latents.of(latents, early)
        with _beginning.lock:
            if not self._running or self._thread != threading.get_ident():
                raise InputError(
                    "this call of the transformer was said to be broken off, and went on; expected "
                    f"its end before {_ANEW}."
                )
            self._move(value, text, getattr(timestep, "dtype", None), known)
            assert self.place is not None
            self.place = replace(self.place, tokens=tokens)  # another for each call

    def _move(self, value: float, text: str, dtype: torch.dtype | None, latents: Latents) -> None:
        here, before = self.place, self.timestep
        if here is None:
            return self._start(value, text, latents)
        if self.interrupted:
            last = self._called[-1]
            again = value == before and last[0] == text
            again = again and (here.step > 0 or latents.digest == self._branches[last].digest)
            if here.step == 0 and (here.call == 0 or (value >= before and not again)):
                return self._start(value, text, latents)
            if again:
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
        self._called = tuple(self._branches)
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
        self._called, self.timestep = (), value
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
        self._branches = {**self._branches, branch: latents}
        number = list(self._branches).index(branch)
        self.place = Place(self._run, step, number, len(self._called))
        self._called = (*self._called, branch)

    def _begin_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        if captures(given, named):
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

    def restart(self) -> None:
        """See `Watch.restart`."""
        self._here().restart()

    def _here(self) -> Progress:
        own: dict[str, Progress] = self._own.__dict__
        return own.setdefault("progress", Progress())

    def _begin_call(self, began: Began | None, model: nn.Module, given: Any, named: Any) -> None:
        if not captures(given, named):
            self._here()._begin_call(began, model, given, named)

    @torch.compiler.disable
    def _end_call(self, *_: Any) -> None:
        self._here()._end_call()
