"""What a kernel needs of its tensors: their device, whichever is the current one, and elements."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode

from wavealign.errors import InputError

_HERE: AbstractContextManager[object] = nullcontext()
_TRACING = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


def on_device(where: Tensor | torch.device) -> AbstractContextManager[object]:
    """Inside, kernels start on the tensor's GPU and its current stream.

    Triton, CuTe and torch's events look at the current device alone. Where that is the right one
    already, or no GPU at all, nothing is done.
    """
    device = where.device if isinstance(where, Tensor) else where
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _HERE
    return torch.cuda.device(device)


def need_elements(name: str, tensor: Tensor) -> None:
    """Raise for a tensor whose elements don't lie in memory of its own, as a kernel reads them.

    Raises:
        InputError: it is sparse, nested, on the meta device, a FakeTensor, a DTensor or another
            that stands for something else; it is inside a transform of torch.func, or traced:
            the lists of one mask would be recorded as if they were all masks'.
    """
    kind, found = type(tensor), None
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        found = f"a {kind.__name__}"
    elif tensor.is_nested or tensor.layout is not torch.strided:
        found = "nested" if tensor.is_nested else f"in layout {tensor.layout}"
    elif tensor.is_meta:
        found = "on the meta device, without elements"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        found = "inside a transform of torch.func"
    elif torch._C._get_tracing_state() is not None or any(map(_get_dispatch_mode, _TRACING)):
        found = "traced"
    if found is not None:
        raise InputError(f"{name} is {found}; expected a dense tensor with elements of its own.")
