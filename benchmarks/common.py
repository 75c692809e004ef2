"""What benchmarks share: paths, arguments, sections, timing, JSON lines, tables, the machine."""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wavealign.structures import json_text

ROOT = Path(__file__).parent.parent
DATA = ROOT / "data"
PROGRAM = (sys.executable, "-m", "wavealign.cli")

Row = dict[str, Any]
Run = Callable[[], object]
_AHEAD_CYCLES = 2_000_000  # a millisecond: the host has queued what it can before it may start


def parser(text: str | None, whole: bool = False) -> argparse.ArgumentParser:
    """A parser that a script's docstring describes: its first line, or all of it as it stands."""
    assert text is not None
    if whole:
        layout = argparse.RawTextHelpFormatter
        return argparse.ArgumentParser(description=text, formatter_class=layout)
    return argparse.ArgumentParser(description=text.splitlines()[0])


def interpret_triton() -> None:
    """Run Triton's kernels on the CPU; before anything imports triton."""
    sys.path.insert(0, str(ROOT / "tools"))
    import interpreter  # noqa: F401


class Notes:
    """A file of JSON lines, each kept at once, and progress on stderr."""

    def __init__(self, path: Path, echo: bool = False) -> None:
        self.path, self._echo = path, echo
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._started

    def note(self, section: str, **values: Any) -> None:
        """Keep a line of results."""
        line = json_text({"section": section, **values})
        if self._echo:
            print(line, file=sys.stderr, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def say(self, text: str) -> None:
        """Progress."""
        print(f"{self.seconds:7.1f} s  {text}", file=sys.stderr, flush=True)

    def run(self, sections: Mapping[str, Run], names: Iterable[str], seconds: float) -> None:
        """Run sections by name; what fails is noted, and what would begin too late."""
        for name in names:
            begun = self.seconds
            if begun > seconds:
                self.note(name, skipped=f"{begun:.0f} s have passed")
                continue
            try:
                sections[name]()
            except Exception as problem:  # the others are still worth having
                traceback.print_exc()
                self.note(name, failed=f"{type(problem).__name__}: {problem}")
            self.note(name, seconds=self.seconds - begun)
            if not self._echo:
                self.say(f"{name}: {self.seconds - begun:.0f} s")


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The JSON lines of files that exist, packed or not."""
    rows: list[Row] = []
    for path in filter(Path.exists, paths):
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as stream:
            rows += map(json.loads, stream)
    return rows


def markdown(header: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    head = list(header)
    rule = f"|{'---|' * len(head)}"
    first, *body = (f"| {' | '.join(line)} |" for line in (head, *lines))
    return "\n".join([first, rule, *body])


def gpu_name() -> str | None:
    """Of the GPU at hand."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def timed(run: Callable[[], Any], cuda: bool) -> tuple[Any, float, float]:
    """A call's result, its time on the device and the host's time in it, ms.

    The device is idle before and after: a wait of the host inside is part of both.
    """
    if not cuda:
        begun = time.perf_counter()
        result = run()
        ms = 1e3 * (time.perf_counter() - begun)
        return result, ms, ms
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    begun = time.perf_counter()
    start.record()
    result = run()
    end.record()
    host_ms = 1e3 * (time.perf_counter() - begun)
    end.synchronize()
    return result, start.elapsed_time(end), host_ms


def median_ms(run: Run, repeats: int, cuda: bool) -> float:
    """Median time of a call on the device, after one to warm up."""
    run()
    return statistics.median(timed(run, cuda)[1] for _ in range(repeats))


def paired_ms(launches: Mapping[str, Run], repeats: int, cuda: bool) -> dict[str, float]:
    """Median time of each, in turn, each with a cold L2; a single call without a GPU."""
    if not cuda:
        return {name: timed(run, cuda)[1] for name, run in launches.items()}
    import torch

    from wavealign.gpu.timing import time_single

    found = time_single(launches, repeats, torch.device("cuda"))
    return {name: times.median_ms for name, times in found.items()}


def best_seconds(work: Run, repeats: int = 5) -> float:
    """The shortest of a few repeats: neighbours only ever add time."""
    return min(timed(work, cuda=False)[1] for _ in range(repeats)) / 1e3


def step_plot(size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes, for values over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e9ee", linewidth=0.8)
    return figure, axis
