"""What launches are measured on: where they run, their clock, their profiler.

Passed in, so that all of measuring also runs on a CPU, or by a clock of a test's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from wavealign._extras import require
from wavealign.errors import MissingCapabilityError

if TYPE_CHECKING:
    import torch

_FLUSH_BYTES = 2**28


class Event(Protocol):
    """A point in the order of what runs, as `torch.cuda.Event` has it."""

    def record(self) -> None:
        """Here it is."""

    def synchronize(self) -> None:
        """Wait until it is reached."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to another one."""


class Rig:
    """The CPU: a call has done its work when it returns, so nothing is queued or waited for.

    Attributes:
        device: where tensors lie.
        name: of the device, as its driver says it.
        sms: processors that rows are dealt to.
        compute_capability: (major, minor).
    """

    name = "CPU"
    sms = 1
    compute_capability = (0, 0)

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")

    def seconds(self) -> float:
        """Time on the wall."""
        return time.perf_counter()

    def event(self, timed: bool = False) -> Event:
        """An event to record; only a timed one has a time."""
        del timed
        return _HostEvent(self.seconds)

    def synchronize(self) -> None:
        """Wait for everything that was started."""

    def spin(self, cycles: int) -> None:
        """Keep the device busy, and cool, with nothing."""

    def flusher(self) -> Callable[[int], object]:
        """A call that pushes everything out of L2; its argument is the byte to write."""
        return lambda byte: byte

    def reader(self, size_bytes: int) -> Callable[[], object]:
        """A call that reads so many bytes of device memory once: the counters' control."""
        import torch

        return torch.ones(1).expand(size_bytes // 4).sum

    def count(self, run: Callable[[], object]) -> None:
        """Run what the profiler is to count."""
        run()


class CudaRig(Rig):
    """A GPU.

    Args:
        device: by default the current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        import torch

        self._cuda = torch.cuda
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name = properties.name
        self.sms = properties.multi_processor_count
        self.compute_capability = (properties.major, properties.minor)

    def event(self, timed: bool = False) -> Event:
        """See `Rig.event`."""
        return self._cuda.Event(enable_timing=timed)

    def synchronize(self) -> None:
        """See `Rig.synchronize`."""
        self._cuda.synchronize(self.device)

    def spin(self, cycles: int) -> None:
        """See `Rig.spin`: one SM spins."""
        self._cuda._sleep(cycles)

    def flusher(self) -> Callable[[int], object]:
        """See `Rig.flusher`: it writes 256 MiB."""
        import torch

        return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device).fill_

    def reader(self, size_bytes: int) -> Callable[[], object]:
        """See `Rig.reader`."""
        import torch

        from wavealign.gpu._triton_kernels import STREAM_CHUNK, stream_read

        source = torch.ones(size_bytes // 4, device=self.device)
        sums = torch.empty(source.numel() // STREAM_CHUNK, device=self.device)
        return lambda: stream_read(source, sums)

    def count(self, run: Callable[[], object]) -> None:
        """See `Rig.count`: what lies between the profiler's start and stop."""
        profiler = self._cuda.cudart()
        self.synchronize()
        profiler.cudaProfilerStart()
        run()
        self.synchronize()
        profiler.cudaProfilerStop()


class _HostEvent:
    def __init__(self, seconds: Callable[[], float]) -> None:
        self._now, self._at = seconds, 0.0

    def record(self) -> None:
        self._at = self._now()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostEvent) -> float:
        return 1e3 * (end._at - self._at)


def find_gpu(purpose: str, otherwise: str = "") -> CudaRig:
    """This machine's GPU.

    Args:
        purpose: what needs it, for the message.
        otherwise: what to do without one, as the message's last words.

    Raises:
        MissingCapabilityError: there is none, or torch isn't installed or can't use it.
    """
    torch = require("torch", "gpu", purpose)
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no CUDA device (driver missing, or none visible)"
        )
        raise MissingCapabilityError(
            f"{purpose} needs an NVIDIA GPU: {why}. `wavealign doctor` says more{otherwise}."
        )
    return CudaRig()
