"""Imported first by scripts that run Triton kernels on the CPU, each in a process of its own.

Triton 3.6's interpreter makes integers of arrays with one element, which numpy 2.4 refuses,
multiplies the bits of bfloat16 matrices as if they were integers, and cuts float32 to bfloat16
instead of rounding it. It also patches triton.language anew for each call of a function inside a
kernel, which takes most of its time.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_dot = interpreter.InterpreterBuilder.create_dot
_cast = interpreter.InterpreterBuilder.cast_impl
_execute = interpreter.GridExecutor.__call__
_patched: set[str] = set()


def _patch_lang_tensor(tensor, scope):
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _as_float32(handle):
    if handle.dtype == tl.bfloat16:
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    elif handle.dtype == tl.float16:
        data = handle.data.astype(np.float32)  # numpy adds float16 up in float16
    else:
        return handle
    return interpreter.TensorHandle(data, tl.float32)


def _cast_impl(self, source, target_type):
    if source.dtype == tl.float32 and target_type.scalar == tl.bfloat16:
        bits = source.data.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        data = np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16)
        return interpreter.TensorHandle(data, tl.bfloat16)
    return _cast(self, source, target_type)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    a, b = _as_float32(a), _as_float32(b)
    return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)


def _launch(self, *arguments, **options):
    _patched.clear()
    return _execute(self, *arguments, **options)


def _call_inside(self, *arguments, **options):
    if self.fn.__module__ not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn.__module__)
    return self.rewrite()(*arguments, **options)


interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.cast_impl = _cast_impl
interpreter.GridExecutor.__call__ = _launch
interpreter.InterpretedFunction.__call__ = _call_inside
