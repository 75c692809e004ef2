"""Triton kernels: a mask to ordered lists, one program a row."""

# triton.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wavealign._devices import on_device


@triton.jit(do_not_specialize=["turn", "owner"])
def ordered_lists(
    mask, counts, kv_orders, backwards, skips, slots, out, state, turn, owner, M, N, width,
    LANES: tl.constexpr, GATHERED: tl.constexpr, REVERSED: tl.constexpr, RAGGED: tl.constexpr,
    PLACES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Row (query block, head): its K/V blocks (or places, with PLACES) in visiting order.

    mask: uint8 ``[H, M, N]``; counts, skips int32, backwards uint8, slots int64 ``[H, M]``;
    kv_orders int32 ``[H, N]``; out int32 ``[H, M, width]``. LANES is a power of 2 from N up.
    """
    wanted = turn
    if GATED:
        wanted = tl.load(state + 1)
    if wanted == turn:
        _ordered_list(
            mask, counts, kv_orders, backwards, skips, slots, out, M, N, width,
            LANES, GATHERED, REVERSED, RAGGED, PLACES,
        )  # fmt: skip
        if GATED and not PLACES:  # the last to write: from now on these are the owner's
            tl.store(state, owner, mask=(tl.program_id(0) == 0) & (tl.program_id(1) == 0))


@triton.jit
def _ordered_list(
    mask, counts, kv_orders, backwards, skips, slots, out, M, N, width,
    LANES: tl.constexpr, GATHERED: tl.constexpr, REVERSED: tl.constexpr, RAGGED: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["turn", "owner"])
def count_rows(
    mask, counts, source, state, turn, owner, N, LANES: tl.constexpr, GATED: tl.constexpr
):
    """Row: how many K/V blocks it keeps; where GATED, whether it differs from the source's.

    mask, source: uint8 ``[rows, N]``; counts int32 ``[rows]``. A row that differs is copied, and
    then, or where the lists aren't the owner's, it is this turn's to write.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, LANES)
    kept = tl.load(mask + row * N + blocks, mask=blocks < N, other=0)
    tl.store(counts + row, tl.sum((kept != 0).to(tl.int32), 0))
    if GATED:
        known = tl.load(source + row * N + blocks, mask=blocks < N, other=0)
        differs = tl.sum((kept != known).to(tl.int32), 0)
        if tl.program_id(0) == 0:
            differs += (tl.load(state) != owner).to(tl.int32)
        if differs != 0:
            tl.store(source + row * N + blocks, kept, mask=blocks < N)
            tl.store(state, -1)
            tl.store(state + 1, turn)


def _options(columns: int):
    lanes = triton.next_power_of_2(columns)
    return {"LANES": lanes, "num_warps": min(16, max(1, lanes // 512))}


def _gate(gate, unused):
    """A gate as kernels take it: state, turn, owner."""
    return (unused, 0, 0) if gate is None else (gate.state, gate.turn, gate.owner)


def launch_lists(mask, counts, walk, slots, layout, out, gate=None) -> None:
    """`write_lists` (wavealign.planning.visits) on a GPU."""
    H, M, N = mask.shape
    with on_device(mask):
        ordered_lists[(M, H)](
            mask.view(torch.uint8), counts, walk.kv_orders, walk.backwards.view(torch.uint8),
            walk.skips, slots, out, *_gate(gate, counts), M, N, out.shape[-1],
            GATHERED=layout.gathers, REVERSED=layout.walks == "backwards",
            RAGGED=layout.ragged_kv_first, PLACES=False, GATED=gate is not None, **_options(N),
        )  # fmt: skip


def launch_places(mask, counts, kv_orders, out, gate=None) -> None:
    """`write_places` (wavealign.planning.visits) on a GPU."""
    H, M, N = mask.shape
    bits = mask.view(torch.uint8)
    with on_device(mask):
        ordered_lists[(M, H)](
            bits, counts, kv_orders, bits, counts, counts, out, *_gate(gate, counts), M, N,
            out.shape[-1], GATHERED=False, REVERSED=False, RAGGED=False, PLACES=True,
            GATED=gate is not None, **_options(N),
        )  # fmt: skip


def launch_counts(mask, out, gate=None) -> None:
    """`row_counts` (wavealign.planning.visits) on a GPU."""
    H, M, N = mask.shape
    bits = mask.view(torch.uint8)
    source = bits if gate is None else gate.source.view(torch.uint8)
    with on_device(mask):
        count_rows[(H * M,)](
            bits, out, source, *_gate(gate, out), N, GATED=gate is not None, **_options(N)
        )
