"""Q, K and V of a launch: random normal tensors, or the caller's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wavealign.errors import InputError
from wavealign.gpu.sizes import Sizes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ALIGNED_BYTES = 16  # of addresses and steps in the hardware's tensor descriptors; a power of 2


@dataclass(frozen=True, eq=False)
class Inputs:
    """Q, K and V.

    Attributes:
        q: ``[B, tokens_q, H, D]``.
        k, v: ``[B, tokens_kv, H_kv, D]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, sizes: Sizes, device: str | torch.device, seed: int = 0) -> Inputs:
        """Standard normal elements, the same for the same seed and device kind.

        Args:
            sizes: of the launch, its dtype one of `DTYPES`.
            device: where they are drawn.
            seed: of the generator.

        Raises:
            InputError: another dtype.
        """
        if sizes.dtype not in DTYPES:
            raise InputError(f"dtype '{sizes.dtype}'; expected {' or '.join(DTYPES)}.")
        generator = torch.Generator(device).manual_seed(seed)

        def draw(tokens: int, heads: int) -> Tensor:
            shape = (sizes.batch, tokens, heads, sizes.head_dim)
            dtype = DTYPES[sizes.dtype]
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        kv_heads = sizes.kv_heads or sizes.H
        return cls(
            draw(sizes.tokens_q, sizes.H),
            draw(sizes.tokens_kv, kv_heads),
            draw(sizes.tokens_kv, kv_heads),
        )

    def sequence(self, b: int) -> Inputs:
        """One sequence, as a view."""
        return Inputs(*(t[b : b + 1] for t in (self.q, self.k, self.v)))

    def arranged(self, strided: bool) -> Inputs:
        """Contiguous, or as `laid_out` where other strides are welcome."""
        tensors = (self.q, self.k, self.v)
        return Inputs(*(laid_out(t if strided else t.contiguous()) for t in tensors))


def laid_out(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where a kernel couldn't read it in place.

    Its last axis has to be contiguous, its address and all other strides multiples of 16 bytes:
    those of axes of size 1 too, for which torch calls any stride contiguous. What is there has to
    be its elements, not their negatives (torch's negative bit).
    """
    bits, size = tensor.data_ptr(), tensor.element_size()
    *strides, last = tensor.stride()
    for stride in strides:
        bits |= stride * size
    if last == 1 and bits % _ALIGNED_BYTES == 0 and not tensor.is_neg():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def differentiated(tensor: Tensor) -> bool:
    """Whether somebody wants derivatives by it, backwards, forwards or by torch.func."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None


def refuse_derivatives(name: str, tensor: Tensor) -> None:
    """Raise for a tensor whose derivative would be lost on the way.

    Raises:
        InputError: it requires a gradient, or carries a tangent.
    """
    if differentiated(tensor):
        raise InputError(
            f"{name} requires a gradient or carries a tangent, and there is no backward pass and "
            "no forward derivative; call it outside of torch.func's transforms and inside "
            "torch.no_grad() or torch.inference_mode(), or detach it."
        )
