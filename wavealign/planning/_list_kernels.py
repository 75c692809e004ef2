"""Triton kernels: a mask to ordered lists, one program a row."""

# triton.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wavealign._devices import on_device


@triton.jit
def ordered_lists(
    mask, counts, kv_orders, backwards, skips, slots, out, M, N, width,
    LANES: tl.constexpr, GATHERED: tl.constexpr, REVERSED: tl.constexpr, RAGGED: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Row (query block, head): its K/V blocks (or places, with PLACES) in visiting order.

    mask: uint8 ``[H, M, N]``; counts, skips int32, backwards uint8, slots int64 ``[H, M]``;
    kv_orders int32 ``[H, N]``; out int32 ``[H, M, width]``. LANES is a power of 2 from N up.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = (head * M + block).to(tl.int64)
    places = tl.arange(0, LANES)
    inside = places < N
    blocks = tl.load(kv_orders + head * N + places, mask=inside, other=0)
    kept = (tl.load(mask + row * N + blocks, mask=inside, other=0) != 0).to(tl.int32)
    visit = tl.cumsum(kept, 0) - 1
    if PLACES:
        tl.store(out + row * width + visit, places, mask=(kept != 0) & (visit < width))
    else:
        count = tl.load(counts + row)
        if tl.load(backwards + row) != 0:
            visit = count - 1 - visit
        visit = visit - tl.load(skips + row)
        visit = tl.where(visit < 0, visit + count, visit)
        if RAGGED:
            ragged = (blocks == N - 1) & (kept != 0)
            at = tl.max(tl.where(ragged, visit, -1), 0)
            visit = tl.where(visit == at, 0, tl.where(visit < at, visit + 1, visit))
        if REVERSED:
            visit = count - 1 - visit
        target = row
        if GATHERED:
            target = head.to(tl.int64) * M + tl.load(slots + row)
        tl.store(out + target * width + visit, blocks, mask=(kept != 0) & (visit < width))


@triton.jit
def kept_blocks(mask, counts, N, LANES: tl.constexpr):
    """Row: how many K/V blocks it keeps. mask: uint8 ``[rows, N]``; counts int32 ``[rows]``."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, LANES)
    kept = tl.load(mask + row * N + blocks, mask=blocks < N, other=0) != 0
    tl.store(counts + row, tl.sum(kept.to(tl.int32), 0))


@triton.jit
def differing(mask, source, state, size, CHUNK: tl.constexpr):
    """Chunk: copied from mask to source where they differ, which the 1 in ``state[1]`` tells.

    mask, source: uint8 ``[size]``; state int32 ``[2]``.
    """
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = at < size
    new = tl.load(mask + at, mask=inside, other=0)
    old = tl.load(source + at, mask=inside, other=0)
    if tl.max((new != old).to(tl.int32), 0) != 0:
        tl.store(source + at, new, mask=inside)
        tl.store(state + 1, 1)


def _options(columns: int):
    lanes = triton.next_power_of_2(columns)
    return {"LANES": lanes, "num_warps": min(16, max(1, lanes // 512))}


def launch_lists(mask, counts, walk, slots, layout, out) -> None:
    """`write_lists` (wavealign.planning.visits) on a GPU."""
    H, M, N = mask.shape
    with on_device(mask):
        ordered_lists[(M, H)](
            mask.view(torch.uint8), counts, walk.kv_orders, walk.backwards.view(torch.uint8),
            walk.skips, slots, out, M, N, out.shape[-1],
            GATHERED=layout.gathers, REVERSED=layout.walks == "backwards",
            RAGGED=layout.ragged_kv_first, PLACES=False, **_options(N),
        )  # fmt: skip


def launch_places(mask, counts, kv_orders, out) -> None:
    """`write_places` (wavealign.planning.visits) on a GPU."""
    H, M, N = mask.shape
    bits = mask.view(torch.uint8)
    with on_device(mask):
        ordered_lists[(M, H)](
            bits, counts, kv_orders, bits, counts, counts, out, M, N, out.shape[-1],
            GATHERED=False, REVERSED=False, RAGGED=False, PLACES=True, **_options(N),
        )  # fmt: skip


def launch_counts(mask, out) -> None:
    """`row_counts` (wavealign.planning.visits) on a GPU."""
    H, M, N = mask.shape
    with on_device(mask):
        kept_blocks[(H * M,)](mask.view(torch.uint8), out, N, **_options(N))


def note_changes(mask, source, state) -> None:
    """Bring a copy of a mask up to date, and set ``state[1]`` to 1 where that changed it.

    Args:
        mask: bool, contiguous, on a GPU.
        source: the copy.
        state: int32 ``[2]``.
    """
    size, chunk = mask.numel(), 4096
    with on_device(mask):
        differing[(triton.cdiv(size, chunk),)](
            mask.view(torch.uint8), source.view(torch.uint8), state, size, chunk, num_warps=4
        )
