"""What launches are measured on: where they run, their clock, their profiler.

Passed in, so that all of measuring also runs on a CPU, or by a clock of a test's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from wavealign._extras import require
from wavealign.errors import MissingCapabilityError

if TYPE_CHECKING:
    import torch

    from wavealign.gpu.backend import Backend
    from wavealign.gpu.sizes import Sizes

_APART_CYCLES = 60_000_000  # some 30 ms in which one SM spins: clocks stay up, power falls
_AHEAD_CYCLES = 2_000_000  # a millisecond: the host has queued the launch before it may start
_FLUSH_BYTES = 2**28


class Rig:
    """The CPU: a call has done its work when it returns, so nothing is queued or waited for.

    Attributes:
        device: where tensors lie.
        name: of the device, as its driver says it.
        sms: processors that rows are dealt to.
        compute_capability: (major, minor).
    """

    device: torch.device
    name = "CPU"
    sms = 1
    compute_capability = (0, 0)

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")

    def rows_in_flight(self, backend: Backend, sizes: Sizes) -> int:
        """How many rows of a launch the device runs at once.

        Raises:
            InputError: the backend can't compute it here.
        """
        backend.check(sizes, self.compute_capability)
        return self.sms * backend.rows_per_sm(sizes)

    def seconds(self) -> float:
        """Time on the wall."""
        return time.perf_counter()

    def time_ms(self, run: Callable[[], object]) -> float:
        """Milliseconds of one call on the device, which has nothing else to do."""
        started = self.seconds()
        run()
        return 1e3 * (self.seconds() - started)

    def mark(self) -> Callable[[], None]:
        """Mark the end of what was started so far; the call that comes back waits for it."""
        return self.synchronize

    def synchronize(self) -> None:
        """Wait for everything that was started."""

    def pauser(self) -> Callable[[int], None]:
        """A call between launches: the device cools, its L2 is emptied. It takes the turn."""
        return lambda turn: None

    def reader(self, size_bytes: int) -> Callable[[], object]:
        """A call that reads so many bytes of device memory once: the counters' control."""
        import torch

        return torch.ones(1).expand(size_bytes // 4).sum

    def count(self, run: Callable[[], object]) -> None:
        """Run what the profiler is to count."""
        run()


class CudaRig(Rig):
    """The current GPU."""

    def __init__(self) -> None:
        import torch

        self._torch, self._cuda = torch, torch.cuda
        self.device = torch.device("cuda", torch.cuda.current_device())
        found = torch.cuda.get_device_properties(self.device)
        self.name, self.sms = found.name, found.multi_processor_count
        self.compute_capability = (found.major, found.minor)

    def time_ms(self, run: Callable[[], object]) -> float:
        """See `Rig.time_ms`: between two events."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda._sleep(_AHEAD_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def mark(self) -> Callable[[], None]:
        """See `Rig.mark`."""
        event = self._cuda.Event()
        event.record()
        return event.synchronize

    def synchronize(self) -> None:
        """See `Rig.synchronize`."""
        self._cuda.synchronize(self.device)

    def pauser(self) -> Callable[[int], None]:
        """See `Rig.pauser`: one SM spins for some 30 ms, then 256 MiB are written."""
        flush = self._torch.empty(_FLUSH_BYTES, dtype=self._torch.uint8, device=self.device)

        def pause(turn: int) -> None:
            self._cuda._sleep(_APART_CYCLES)
            flush.fill_(turn)

        return pause

    def reader(self, size_bytes: int) -> Callable[[], object]:
        """See `Rig.reader`."""
        from wavealign.gpu._triton_kernels import STREAM_CHUNK, stream_read

        source = self._torch.ones(size_bytes // 4, device=self.device)
        sums = self._torch.empty(source.numel() // STREAM_CHUNK, device=self.device)
        return lambda: stream_read(source, sums)

    def count(self, run: Callable[[], object]) -> None:
        """See `Rig.count`: what lies between the profiler's start and stop."""
        profiler = self._cuda.cudart()
        self.synchronize()
        profiler.cudaProfilerStart()
        run()
        self.synchronize()
        profiler.cudaProfilerStop()


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
