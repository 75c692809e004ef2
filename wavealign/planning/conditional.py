"""Work that a GPU does only where it finds that it must: a CUDA graph with an IF node.

The host starts the graph and goes on; it never learns what the device found. Conditional nodes:
CUDA 12.4 on (https://docs.nvidia.com/cuda/cuda-c-programming-guide/, "Conditional Graph Nodes").
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wavealign._devices import on_device
from wavealign._locks import ForkSafeLock

_LEAST_DRIVER = 12040
NOBODY = -1

# As torch's own graphs have memory: `torch.cuda.MemPool` ends the process where one goes while
# another thread allocates from one (torch 2.11), and waits for the device.
_ALLOCATOR = (
    "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool",
)  # fmt: skip

# `state` is [owner, changed]. Work that begins makes what it writes nobody's until it is done.
_DECIDE = r"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

extern "C" __global__ void decide(unsigned long long handle, int *state, int owner) {
    const bool needed = state[1] != 0 || state[0] != owner;
    state[1] = 0;
    if (needed) state[0] = -1;
    cudaGraphSetConditional(handle, needed);
}
"""


def missing(device: torch.device) -> str | None:
    """Why there can't be such work on a device; None where there can."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device} is no CUDA device"
    try:
        from cuda.bindings import driver
    except ImportError:
        return "cuda-bindings isn't installed: pip install 'wavealign[gpu]'"
    if not all(hasattr(torch._C, name) for name in _ALLOCATOR):
        return "this torch doesn't say how its allocator is given a pool"
    version = _done(driver.cuDriverGetVersion())
    return None if version >= _LEAST_DRIVER else "the driver is older than CUDA 12.4's"


class Conditional:
    """Captured work, done where ``state`` says that it must be."""

    def __init__(self, work: Callable[[], object], state: Tensor, owner: int) -> None:
        """Capture.

        Args:
            work: starts kernels on the device of `state`, all of them compiled, and waits for
                nothing. What it allocates stays with this object.
            state: int32 ``[2]``: whose the results are (`NOBODY`'s while they are made), and
                whether what they are made from has changed. The work is done where the first
                isn't `owner` or the second isn't 0; afterwards they are ``[owner, 0]``.
            owner: of the results.

        Raises:
            RuntimeError: it can't be captured, or no memory is left.
        """
        from cuda.bindings import driver

        self._driver, self._state = driver, state
        self._release = torch._C._cuda_releasePool
        self._graph: Any = None
        self._exec: Any = None
        self._pool: Any = None
        with on_device(state):
            self._device_index = torch.cuda.current_device()
            captured = self._captured(work, owner)
            try:
                self._build(captured, owner)
            finally:
                driver.cuGraphDestroy(captured)

    def launch(self) -> None:
        """Start it on its device's current stream."""
        stream = torch.cuda.current_stream(self._state.device).cuda_stream
        _done(self._driver.cuGraphLaunch(self._exec, stream))

    def _captured(self, work: Callable[[], object], owner: int) -> Any:
        """The work's own graph.

        Torch's own capture would make the generator of random numbers fail in other threads while
        it lasts; this one concerns this thread's stream alone.
        """
        driver, aside = self._driver, _aside(self._device_index)
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with _capturing.lock, torch.cuda.stream(aside), self._memory():
            _done(driver.cuStreamBeginCapture(aside.cuda_stream, relaxed))
            try:
                work()
                self._state[0].fill_(owner)
            except BaseException:
                _, unfinished = driver.cuStreamEndCapture(aside.cuda_stream)
                driver.cuGraphDestroy(unfinished)
                raise
            return _done(driver.cuStreamEndCapture(aside.cuda_stream))

    @contextlib.contextmanager
    def _memory(self) -> Iterator[None]:
        """Inside, this thread's tensors lie in memory that is this object's for good."""
        pool = torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device_index, pool)
        self._pool = pool
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self._device_index, pool)

    def _build(self, captured: Any, owner: int) -> None:
        driver = self._driver
        context = _done(driver.cuCtxGetCurrent())
        graph = self._graph = _done(driver.cuGraphCreate(0))
        assigned = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        handle = _done(driver.cuGraphConditionalHandleCreate(graph, context, 0, assigned))
        kernel = driver.CUDA_KERNEL_NODE_PARAMS()
        kernel.func = _decide(self._device_index)
        kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
        kernel.blockDimX = kernel.blockDimY = kernel.blockDimZ = 1
        values = (int(handle), self._state.data_ptr(), owner)
        kernel.kernelParams = (values, (ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_int))
        kernel.ctx = context
        decided = _done(driver.cuGraphAddKernelNode(graph, None, 0, kernel))
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        node.conditional.size = 1
        node.conditional.ctx = context
        # Before CUDA 13 the function with edges of data had a name of its own.
        add = getattr(driver, "cuGraphAddNode_v2", driver.cuGraphAddNode)
        _done(add(graph, [decided], None, 1, node))
        _done(driver.cuGraphAddChildGraphNode(node.conditional.phGraph_out[0], None, 0, captured))
        self._exec = _done(driver.cuGraphInstantiate(graph, 0))

    def __del__(self) -> None:
        if self._exec is not None:
            self._driver.cuGraphExecDestroy(self._exec)
        if self._graph is not None:
            self._driver.cuGraphDestroy(self._graph)
        if self._pool is not None:
            self._release(self._device_index, self._pool)


_capturing = ForkSafeLock()  # threads may share a stream, and so the one to capture on
_asides: dict[tuple[int, int], torch.cuda.Stream] = {}


def _aside(device_index: int) -> torch.cuda.Stream:
    """The stream to capture on what runs on the current one.

    cuBLAS has one workspace a stream, and captured work keeps using it: only work that runs on one
    stream, in turn, may share it.
    """
    from cuda.bindings import driver

    key = device_index, torch.cuda.current_stream(device_index).cuda_stream
    if key not in _asides:
        made = _done(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        _asides[key] = torch.cuda.ExternalStream(int(made), device_index)
    return _asides[key]


@functools.cache
def _decide(device_index: int) -> Any:
    """The kernel that sets the condition, compiled for a device."""
    from cuda.bindings import driver, nvrtc

    major, minor = torch.cuda.get_device_capability(device_index)
    program = _done(nvrtc.nvrtcCreateProgram(_DECIDE.encode(), b"decide.cu", 0, [], []))
    _done(nvrtc.nvrtcCompileProgram(program, 1, [f"-arch=sm_{major}{minor}".encode()]))
    code = bytearray(_done(nvrtc.nvrtcGetCUBINSize(program)))
    _done(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    module = _done(driver.cuModuleLoadData(bytes(code)))
    return _done(driver.cuModuleGetFunction(module, b"decide"))


def _done(answer: tuple[Any, ...]) -> Any:
    """What a call gave.

    Raises:
        RuntimeError: it failed.
    """
    status, *given = answer
    if status.value:
        raise RuntimeError(f"CUDA answered {status.name}")
    return given[0] if given else None
