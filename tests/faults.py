"""Exceptions where a counter says: at an allocation, at a launch, between two lines.

A `Fault` is around one call of one thread. It counts the places of its kind that the call passes,
and raises at the n-th, or at the first that never failed before:

- allocation: a torch operation that returns memory of its own, before it happens;
- launch: a backend's kernel or a session's attention, before it starts or right behind it;
- line: soon behind the beginning of a line of WaveAlign's own, where Python lets Ctrl-C come.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import sys
import threading
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import wavealign

KINDS = ("allocation", "launch", "line")
_RAISED = {
    "allocation": (torch.OutOfMemoryError, MemoryError),
    "launch": (RuntimeError, KeyboardInterrupt),
}
_STRIDES = {"allocation": 17, "launch": 1, "line": 211}  # from one call's place to the next one's
_REST = 1  # calls behind one without a new place, before one is looked for again
_PACKAGE = str(Path(wavealign.__file__).parent)
_here = threading.local()
_unraisable = sys.unraisablehook


def _raisable(told) -> None:
    """An interrupt that came in a finalizer is lost, as Ctrl-C is."""
    if not issubclass(told.exc_type, Interrupt):
        _unraisable(told)


sys.unraisablehook = _raisable


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, of one thread."""


class Fault:
    """Around a call: raises at the n-th place of a kind, if it comes so far.

    Attributes:
        passed: places, the one that failed included.
        seen: which they were: a line of WaveAlign's, and what was done there.
        failed: the one that did; empty before.
        known: see `__init__`.
    """

    def __init__(self, kind: str, at: int, within: str = "", known: set[str] | None = None) -> None:
        """Before the call.

        Args:
            kind: one of `KINDS`.
            at: n, from 1.
            within: lines of this module or folder alone, as ``"attention/lanes.py"``.
            known: raise at the first place that isn't among these, in place of the n-th.
        """
        self.kind, self.at, self._within, self.known = kind, at, f"{_PACKAGE}/{within}", known
        self.passed, self.seen, self.failed = 0, set(), ""
        self._raised: BaseException | None = None
        self._mode = _Allocations(self) if kind == "allocation" else contextlib.nullcontext()

    def raised(self, problem: BaseException) -> bool:
        """Whether an exception is this fault's."""
        if self.kind != "line":
            return self._raised is problem
        if isinstance(problem, SystemError) and problem.__cause__ is not None:  # numba's
            return self.raised(problem.__cause__)
        return isinstance(problem, Interrupt)

    def __enter__(self) -> Fault:
        self._mode.__enter__()
        _here.fault = self
        if self.kind == "line":
            self._tracer = sys.gettrace()
            before = getattr(self._tracer, "__self__", None)
            if isinstance(before, Fault):  # its interrupt came on leaving it
                self._tracer = before._tracer
            sys.settrace(self._trace)
        return self

    def __exit__(self, *problem: object) -> None:
        # An interrupt that hasn't come yet comes here, before anything else.
        if self.kind == "line":
            sys.settrace(self._tracer)
        _here.fault = None
        self._mode.__exit__(*problem)

    def pass_by(self, place: str) -> None:
        """One more place."""
        self.passed += 1
        self.seen.add(place)
        due = self.passed == self.at if self.known is None else place not in self.known
        if self.failed or not due:
            return
        self.failed = place
        if self.kind == "line":
            return
        kinds = _RAISED[self.kind]
        self._raised = kinds[self.at % len(kinds)](f"{self.kind} {self.at} fails: {place}")
        raise self._raised

    def _trace(self, frame, event, _):
        if self.failed:
            return None
        if event == "call" and not frame.f_code.co_filename.startswith(self._within):
            return None
        if event == "line":
            self.pass_by(_line(frame))
        return _interrupter() if self.failed else self._trace


def _interrupter():
    """A trace function that interrupts this thread once, at the frame's next event.

    All of it is C's: behind a line of ours Python would look for the interrupt at once, between two
    lines of the traced code, where a real one never comes.
    """
    function = ctypes.pythonapi["PyThreadState_SetAsyncExc"]
    function.restype = None
    thread, nobody = ctypes.c_ulong(threading.get_ident()), ctypes.c_ulong(0)
    function.argtypes = [
        _Arguments(itertools.chain([thread], itertools.repeat(nobody))),
        _Arguments(itertools.repeat(ctypes.py_object(Interrupt))),
        _Arguments(itertools.repeat(ctypes.c_int())),
    ]
    return function


class _Arguments:
    """Those of a C function, one after the other, whatever it is called with."""

    def __init__(self, values) -> None:
        self.from_param = functools.partial(next, values)


class _Allocations(TorchDispatchMode):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _allocates(func):
            self._fault.pass_by(f"{_innermost()} {func.__name__}")
        return func(*args, **(kwargs or {}))


@functools.cache
def _allocates(func: torch._ops.OpOverload) -> bool:
    returned = func._schema.returns
    return any(r.alias_info is None and isinstance(r.type, torch.TensorType) for r in returned)


def _ours(frame) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _line(frame) -> str:
    return f"{frame.f_code.co_filename[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"


def _innermost() -> str:
    frame = sys._getframe(2)
    while frame is not None and not _ours(frame):
        frame = frame.f_back
    return "elsewhere" if frame is None else _line(frame)


def launching(function, name):
    """A kernel that fails where this thread's fault wants it to."""

    @functools.wraps(function)
    def launch(*arguments, **named):
        fault = getattr(_here, "fault", None)
        pass_by = fault.pass_by if fault is not None and fault.kind == "launch" else None
        if pass_by:
            pass_by(f"before {name}")
        made = function(*arguments, **named)
        if pass_by:
            pass_by(f"behind {name}")
        return made

    return launch


@contextlib.contextmanager
def launches_watched(*backends):
    """Inside, launches of these backends and of sessions' own attention are places."""
    from wavealign.sessions import adaspa, gsrs, session

    with contextlib.ExitStack() as stack:

        def watch(owner, name, made):
            stack.enter_context(mock.patch.object(owner, name, made))

        for backend in backends:
            kind = type(backend)
            watch(kind, "bind", _bound(kind.bind, backend.name))
        for module in (gsrs, adaspa):
            name = "attend_with_importance"
            watch(module, name, launching(getattr(module, name), "a search"))
        watch(session, "attend_dense", launching(session.attend_dense, "full attention"))
        yield


def _bound(bind, name):
    @functools.wraps(bind)
    def watched(*arguments):
        kernel = bind(*arguments)
        return dataclasses.replace(kernel, launch=launching(kernel.launch, name))

    return watched


class Counter:
    """Where one thread's calls fail, one after the other: everywhere in the end.

    They fail where none has failed before. Where that is nowhere, the next few go through the
    places of their sort of calls in strides, and begin anew behind the last.
    """

    def __init__(self, thread: int, failed: dict[str, set[str]]) -> None:
        """Of a thread.

        Args:
            thread: its number.
            failed: places of each kind where a call of any thread has failed.
        """
        self._kinds, self._first, self._failed = itertools.cycle(KINDS), 1 + thread, failed
        self._next: dict[tuple[str, str], int] = {}
        self._rest: dict[tuple[str, str], int] = {}  # calls that needn't look for new places

    def fault(self, sort: str) -> Fault:
        """The next call's of a sort."""
        kind = next(self._kinds)
        looks = self._rest.get((sort, kind), 0) == 0
        at = self._next.setdefault((sort, kind), self._first)
        return Fault(kind, at, known=self._failed[kind] if looks else None)

    def go_on(self, sort: str, fault: Fault) -> None:
        """After the call."""
        key = sort, fault.kind
        if fault.failed:
            self._failed[fault.kind].add(fault.failed)
        if fault.known is not None:
            self._rest[key] = 0 if fault.failed else _REST
            return
        self._rest[key] = max(0, self._rest.get(key, 0) - 1)
        self._next[key] = fault.at + _STRIDES[fault.kind]
        if not fault.failed:
            self._next[key] = max(1, fault.at - fault.passed)
