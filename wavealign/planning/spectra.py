"""Row coordinates by a batched randomized SVD: `svd` on the device.

A block of random vectors goes through a fixed number of power iterations with the column-centred
mask (Halko, Martinsson & Tropp 2011, https://doi.org/10.1137/090771806, algorithm 4.4), and a
Rayleigh-Ritz step takes the leading left singular vector from what they span. Everything small is
in float64 and by methods that report no status, so that the host never waits: Cholesky with a
ridge to make bases, repeated squaring for the leading eigenvector of an 8 x 8 matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

RANK = 8
"""Vectors of the block. The leading one converges as (σ₉/σ₁)² per iteration."""

ITERATIONS = 8
"""Power iterations, two products with the mask each."""

_RIDGE = 1e-10  # of the trace: where fewer than RANK directions are left
_SQUARINGS = 24
_CHUNK_BYTES = 2**30  # of the float32 copy of the mask
_ROUNDING = 5  # digits, as in wavealign.order.spectra


def svd_order(mask: Tensor, counts: Tensor, start: Tensor) -> Tensor:
    """Sort by σ₁u₁ of the column-centred mask, from the end where NNZ is large.

    Args:
        mask: bool ``[H, M, N]``.
        counts: int32 ``[H, M]``, K/V blocks of each row.
        start: float32 ``[N, RANK]``, the random vectors.

    Returns:
        int64 ``[H, M]``, slot → query block. Coordinates are rounded to five digits of the
        largest, and equal ones keep their natural order.
    """
    heads = max(1, _CHUNK_BYTES // (4 * mask.shape[1] * mask.shape[2]))
    with torch.autocast(mask.device.type, enabled=False):  # whatever the caller's region says
        orders = [
            _descending(leading_coordinate(part, start), part_counts)
            for part, part_counts in zip(mask.split(heads), counts.split(heads), strict=True)
        ]
    return torch.cat(orders) if len(orders) > 1 else orders[0]


def leading_coordinate(mask: Tensor, start: Tensor) -> Tensor:
    """σ₁u₁ of each head's column-centred mask, float64 ``[H, M]``; 0 where all rows are equal."""
    matrix = mask.float()
    M = matrix.shape[1]
    mean = matrix.mean(1, keepdim=True)  # [H, 1, N]
    flat = ((mean == 0) | (mean == 1)).all(-1)  # [H, 1]

    def times(x: Tensor) -> Tensor:  # [H, N, r] -> [H, M, r]
        return matrix @ x - mean @ x

    def transposed_times(y: Tensor) -> Tensor:  # [H, M, r] -> [H, N, r]
        return matrix.mT @ y - mean.mT * y.sum(1, keepdim=True)

    block = times(start.expand(len(matrix), -1, -1))
    for _ in range(ITERATIONS):
        block = times(_basis(transposed_times(_basis(block))))
    basis = _basis(block)
    image = transposed_times(basis).double()  # [H, N, r]
    gram = image.mT @ image
    vector = _leading_eigenvector(gram)  # [H, r, 1]
    value = (image @ vector).norm(dim=1, keepdim=True)
    coordinate = (basis.double() @ vector * value).squeeze(-1)
    return torch.where(flat.expand(-1, M), 0.0, coordinate)


def _basis(block: Tensor) -> Tensor:
    """Columns with the same span, orthonormal but for directions that have died out."""
    # Columns may differ by orders of magnitude after a product: equal lengths first.
    block = block / block.norm(dim=1, keepdim=True).clamp_min(1e-30)
    wide = block.double()
    gram = wide.mT @ wide
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    factor, _ = torch.linalg.cholesky_ex(gram + (_RIDGE * trace + 1e-30) * eye)
    basis = torch.linalg.solve_triangular(factor.mT, wide, upper=True, left=False)
    return basis.float()


def _leading_eigenvector(gram: Tensor) -> Tensor:
    """Of a positive semidefinite ``[H, r, r]``, as ``[H, r, 1]`` of length 1 (or 0)."""
    power = gram
    for _ in range(_SQUARINGS):
        scale = power.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(1e-300)
        power = power / scale
        power = power @ power
    largest = power.diagonal(dim1=-2, dim2=-1).argmax(-1)
    column = power.gather(-1, largest[:, None, None].expand(-1, power.shape[1], 1))
    return column / column.norm(dim=1, keepdim=True).clamp_min(1e-300)


def _descending(coordinate: Tensor, counts: Tensor) -> Tensor:
    largest = coordinate.abs().amax(-1, keepdim=True)
    safe = torch.where(largest > 0, largest, 1.0)
    rounded = torch.round(coordinate / safe * 10**_ROUNDING)
    length = counts.double()
    lean = (rounded * (length - length.mean(-1, keepdim=True))).sum(-1, keepdim=True)
    first = rounded.gather(-1, rounded.abs().argmax(-1, keepdim=True))
    # No row is longer: turn the largest entry upwards. Sums of whole numbers below 2**53 times
    # multiples of 1/M are exact enough for this threshold.
    up = torch.where(lean.abs() > 1e-6, lean, first) > 0
    return torch.argsort(torch.where(up, -rounded, rounded), dim=-1, stable=True)
