"""Every form in which a mask may lie on a device, as bool ``[H, M, N]``.

Nothing here looks at values, so nothing waits for the device: a K/V block out of range is torch's
own (asynchronous) error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavealign.errors import InputError

_INTEGERS = (torch.int32, torch.int64)


def dense_mask(mask: Tensor) -> Tensor:
    """A bool mask as bool ``[H, M, N]``, contiguous; a batch axis is folded into the heads.

    Args:
        mask: bool (or uint8: not zero) ``[M, N]``, ``[H, M, N]`` or ``[B, H, M, N]``.

    Raises:
        InputError: another dtype or rank, or an axis of size 0.
    """
    if mask.dtype not in (torch.bool, torch.uint8):
        raise InputError(f"a mask of {mask.dtype}; expected torch.bool, one element a block.")
    if mask.ndim not in (2, 3, 4) or 0 in mask.shape:
        raise InputError(
            f"a mask of shape {list(mask.shape)}; expected [M, N], [H, M, N] or [B, H, M, N] with "
            "no axis of size 0."
        )
    heads = mask.reshape(-1, *mask.shape[-2:]).contiguous()
    return heads if heads.dtype == torch.bool else heads != 0


def mask_from_packed(packed: Tensor, columns: int) -> Tensor:
    """Bool ``[..., M, N]`` from ``numpy.packbits(mask, axis=-1)``.

    Args:
        packed: uint8 ``[..., M, ceil(N / 8)]``, big-endian bit order.
        columns: N.

    Raises:
        InputError: another dtype or width.
    """
    if packed.dtype != torch.uint8 or packed.ndim < 2 or packed.shape[-1] != -(-columns // 8):
        raise InputError(
            f"packed bits {packed.dtype} {list(packed.shape)}; expected torch.uint8 [..., M, "
            f"{-(-columns // 8)}] for {columns} K/V blocks."
        )
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    bits = (packed[..., None] >> shifts) & 1
    return bits.flatten(-2)[..., :columns].contiguous().bool()


def mask_from_lists(
    indices: Tensor, columns: int, *, counts: Tensor | None = None, indptr: Tensor | None = None,
    shape: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Bool ``[..., M, N]`` from lists of K/V blocks, in any order.

    Args:
        indices: integers: ``[..., M, width]`` beside `counts`, ``(nnz,)`` beside `indptr`.
        columns: N.
        counts: integers ``[..., M]``: how many entries of each row of `indices` hold.
        indptr: integers ``(H * M + 1,)``: where each row's list begins and ends.
        shape: ``(H, M)``, beside `indptr`.

    Raises:
        InputError: neither or both of `counts` and `indptr`, or shapes that contradict each other.
    """
    if (counts is None) == (indptr is None):
        raise InputError("lists need either counts (padded lists) or indptr.")
    second = counts if counts is not None else indptr
    assert second is not None
    for name, tensor in (("indices", indices), ("counts or indptr", second)):
        if tensor.dtype not in _INTEGERS:
            raise InputError(f"{name} of {tensor.dtype}; expected torch.int32 or torch.int64.")
    if indices.device != second.device:
        raise InputError(f"indices on {indices.device}, counts or indptr on {second.device}.")
    if counts is not None:
        return _from_padded(indices, counts, columns)
    if shape is None:
        raise InputError("lists with indptr need shape=(H, M).")
    H, M = shape
    if second.shape != (H * M + 1,) or indices.ndim != 1:
        raise InputError(
            f"indptr {list(second.shape)} and indices {list(indices.shape)}; expected "
            f"[{H * M + 1}] and [nnz] for {H} heads of {M} query blocks."
        )
    places = torch.arange(indices.shape[0], device=indices.device, dtype=second.dtype)
    rows = torch.searchsorted(second.contiguous(), places, right=True) - 1
    mask = torch.zeros(H * M, columns, dtype=torch.bool, device=indices.device)
    mask.index_put_((rows, indices.long()), torch.ones((), dtype=torch.bool, device=mask.device))
    return mask.view(H, M, columns)


def _from_padded(indices: Tensor, counts: Tensor, columns: int) -> Tensor:
    if indices.shape[:-1] != counts.shape or counts.ndim < 1:
        raise InputError(
            f"indices {list(indices.shape)} and counts {list(counts.shape)}; expected "
            "[..., M, width] and [..., M]."
        )
    places = torch.arange(indices.shape[-1], device=indices.device)
    # Entries behind a row's count go to a column of their own.
    held = torch.where(places < counts[..., None], indices.long(), columns)
    mask = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=indices.device)
    mask.scatter_(-1, held, True)
    return mask[..., :columns].contiguous()
