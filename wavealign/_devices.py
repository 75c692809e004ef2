"""The device that a kernel runs on: that of its tensors, whichever is the current one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_HERE: AbstractContextManager[object] = nullcontext()


def on_device(where: Tensor | torch.device) -> AbstractContextManager[object]:
    """Inside, kernels start on the tensor's GPU and its current stream.

    Triton, CuTe and torch's events look at the current device alone. Where that is the right one
    already, or no GPU at all, nothing is done.
    """
    device = where.device if isinstance(where, Tensor) else where
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _HERE
    return torch.cuda.device(device)
