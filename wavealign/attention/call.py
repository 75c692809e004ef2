"""`attend`: block-sparse attention of one call."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from wavealign._devices import on_device
from wavealign.attention.inputs import Sequences, check_mask
from wavealign.attention.lanes import capturing
from wavealign.attention.plans import Plan, prepare
from wavealign.attention.terms import Terms
from wavealign.errors import InputError
from wavealign.masks.block_mask import BlockMask

Mask = Tensor | BlockMask


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = ..., *, backend: str = ...,
    plan: Plan | None = ..., return_lse: Literal[False] = ..., layout: str = ...,
    block: tuple[int, int] | None = ..., policy: str = ..., device_profile: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = ..., *, backend: str = ...,
    plan: Plan | None = ..., return_lse: Literal[True], layout: str = ...,
    block: tuple[int, int] | None = ..., policy: str = ..., device_profile: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@torch.compiler.disable
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, *, backend: str = "auto",
    plan: Plan | None = None, return_lse: bool = False, layout: str = "bhsd",
    block: tuple[int, int] | None = None, policy: str = "auto", device_profile: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q over the K/V blocks that the mask keeps, softmax scale 1/√D.

    The output is the backend's own: a schedule changes the order of sums, nothing else. Rows
    without a block give 0 and log-sum-exp -inf. Under torch.compile it runs eagerly.

    Args:
        q: ``[B, H, tokens, D]``, or ``[B, tokens, H, D]`` with ``layout="bshd"``.
        k, v: the same with the K/V heads (as many, or a divisor: GQA) and tokens.
        mask: bool ``[H, M, N]`` (for every sequence) or ``[B, H, M, N]``, on q's device, or a
            `BlockMask`. May be left out beside a plan.
        backend: ``"auto"`` (row table where it applies, else FlashAttention-4), or the name of one,
            as `wavealign doctor` lists them; ``"reference"`` (slow, float32) runs on any device.
        plan: from `wavealign.plan`; its lists are what is computed.
        return_lse: also return the log-sum-exp, float32 ``[B, H, tokens]``.
        layout: ``"bhsd"`` or ``"bshd"``, of q, k, v and the output.
        block: tokens of a query and of a K/V block; by default 128x128, or the `BlockMask`'s own.
        policy, device_profile: see `wavealign.plan`, where no plan is given. With ``"auto"`` the
            guard looks at the mask only where that costs next to nothing beside this one call;
            `wavealign.plan` and `wavealign.Attention` look closer, for plans that serve longer.

    Raises:
        InputError: what doesn't fit together.
        MissingCapabilityError: no backend can run here, with the reasons.

    Example:
        >>> import torch
        >>> import wavealign as wa
        >>> q, k, v = torch.randn(3, 1, 2, 256, 64)  # [B, H, tokens, D]
        >>> mask = torch.ones(2, 2, 2, dtype=torch.bool)  # blocks of 128 x 128 tokens
        >>> out = wa.attend(q, k, v, mask, policy="nnz", device_profile="h200", backend="reference")
        >>> full = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> torch.allclose(out, full, atol=1e-5)
        True
    """
    sequences = Sequences.check(q, k, v, layout)
    with on_device(sequences.q):
        if plan is None:
            if mask is None:
                raise InputError("attend needs a mask or a plan.")
            if capturing(q.device):
                raise InputError(
                    "a CUDA graph is being captured, and planning anew needs the host; expected a "
                    "plan made beforehand, attend(q, k, v, plan=...), or a wavealign.Attention."
                )
            heads, sizes = check_mask(mask, block, sequences.tokens, q.device)
            terms = Terms(policy, device_profile, backend)
            prepared = prepare(terms, sequences.fitted(sizes), q.device)
            plan = prepared.plan(heads, prepared.planner(), calls=1)
        else:
            plan = plan.fitted(sequences, backend)
            if mask is not None and tuple(mask.shape[-2:]) != (plan.sizes.M, plan.sizes.N):
                raise InputError(
                    f"the plan is for a mask of {plan.sizes.M}x{plan.sizes.N} blocks a head."
                )
        out, lse = plan.attend(sequences)
    return (sequences.output(out), lse) if return_lse else sequences.output(out)
