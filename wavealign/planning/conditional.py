"""Work that a GPU does only where it finds that it must: a CUDA graph with an IF node.

The host starts the graph and goes on; it never learns what the device found. Conditional nodes:
CUDA 12.4 on (https://docs.nvidia.com/cuda/cuda-c-programming-guide/, "Conditional Graph Nodes").
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wavealign._devices import on_device

_LEAST_DRIVER = 12040
NOBODY = -1

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
        self._graph: Any = None
        self._exec: Any = None
        with on_device(state):
            self._pool = torch.cuda.MemPool()
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
        driver, aside = self._driver, torch.cuda.Stream(self._state.device)
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with torch.cuda.use_mem_pool(self._pool), torch.cuda.stream(aside):
            _done(driver.cuStreamBeginCapture(aside.cuda_stream, relaxed))
            try:
                work()
                self._state[0].fill_(owner)
            except BaseException:
                _, unfinished = driver.cuStreamEndCapture(aside.cuda_stream)
                driver.cuGraphDestroy(unfinished)
                raise
            return _done(driver.cuStreamEndCapture(aside.cuda_stream))

    def _build(self, captured: Any, owner: int) -> None:
        driver = self._driver
        context = _done(driver.cuCtxGetCurrent())
        graph = self._graph = _done(driver.cuGraphCreate(0))
        assigned = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        handle = _done(driver.cuGraphConditionalHandleCreate(graph, context, 0, assigned))
        kernel = driver.CUDA_KERNEL_NODE_PARAMS()
        kernel.func = _decide(self._state.device.index or 0)
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
