"""Triton kernels of `phased`: a list schedule of the launch, and where rows enter their pass."""

# triton.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from wavealign._devices import on_device
from wavealign.errors import InputError
from wavealign.order._kernels import REACH_PLACES

MOST_WORKERS = 1024
_PROBES = 256


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["turn"])
def list_schedule(
    length, starts, workers, state, turn, total, wave, BLOCK_TICKS, START_TICKS,
    LANES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Which worker takes each row, and when: one program a launch of `total` rows.

    length: int32 ``[launches, total]`` by launch order; out: starts int64 (the tick at which the
    worker is free) and workers int32 of the same shape. A row goes to the worker that is free
    first, ties to the lowest. With the workers sorted by (tick, number), the next rows go to them
    in that order for as long as no row that has just been given out ends before the next worker is
    free; so a whole batch is taken at once, usually most of a wave.
    """
    launch = tl.program_id(0).to(tl.int64) * total
    length += launch
    starts += launch
    workers += launch
    lanes = tl.arange(0, LANES)
    far: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    keys = tl.where(lanes < wave, lanes.to(tl.int64), far)  # tick * 1024 + worker
    slot = 0
    if GATED:
        total = tl.where(tl.load(state + 1) == turn, total, 0)
    while slot < total:
        keys = tl.sort(keys)
        real = (lanes < wave) & (slot + lanes < total)
        blocks = tl.load(length + slot + lanes, mask=real, other=0).to(tl.int64)
        after = keys + (START_TICKS + blocks * BLOCK_TICKS) * 1024
        after = tl.where(real, after, far)
        earliest = tl.associative_scan(after, 0, _smaller)
        taken = real & (keys < earliest)
        tl.store(starts + slot + lanes, keys // 1024, mask=taken)
        tl.store(workers + slot + lanes, (keys % 1024).to(tl.int32), mask=taken)
        keys = tl.where(taken, after, keys)
        slot += tl.sum(taken.to(tl.int32), 0)


@triton.jit(do_not_specialize=["turn"])
def enter_passes(
    order, counts, places, phased, starts, workers, cosines, sines, skips, state, turn,
    M, N, width, BLOCK_TICKS, START_TICKS,
    LANES: tl.constexpr, PROBES: tl.constexpr, REACH: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One program a head, slot after slot: the circular mean of the rows in flight, and the entry.

    order, counts int32 ``[H, M]``; places int32 ``[H, M, width]``, ascending; phased uint8 ``[H]``;
    starts int64, workers int32 ``[H, M]`` by slot; cosines, sines float64 ``[N]`` by place;
    skips int32 ``[H, M]`` by query block, 0 on entry.
    """
    head = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    probes = tl.arange(0, PROBES)
    begin = tl.zeros([LANES], tl.int64)
    end = tl.zeros([LANES], tl.int64)
    base = tl.zeros([LANES], tl.int64)
    extent = tl.zeros([LANES], tl.int32)
    offset = tl.zeros([LANES], tl.int32)
    two_pi: tl.constexpr = 6.283185307179586
    slots = tl.load(phased + head).to(tl.int32) * M
    if GATED:
        slots = tl.where(tl.load(state + 1) == turn, slots, 0)
    for slot in range(slots):
        now = tl.load(starts + head * M + slot)
        worker = tl.load(workers + head * M + slot)
        block = tl.load(order + head * M + slot)
        row = (head * M + block).to(tl.int64)
        length = tl.load(counts + row)
        live = (extent > 0) & (end > now)
        done = tl.maximum(now - begin, 0) // BLOCK_TICKS
        at = tl.minimum(done.to(tl.int32), extent - 1) + offset
        at = tl.where(at >= extent, at - extent, at)
        place = tl.load(places + base + at, mask=live, other=0)
        x = tl.sum(tl.load(cosines + place, mask=live, other=0.0), 0)
        y = tl.sum(tl.load(sines + place, mask=live, other=0.0), 0)
        squared = x * x + y * y
        skip = 0
        if (length > 0) & (squared > 1e-18):
            # atan2, from a rational guess and one step with sine and cosine of the guess.
            ax = tl.abs(x)
            ay = tl.abs(y)
            ratio = tl.minimum(ax, ay) / tl.maximum(ax, ay)
            square = ratio * ratio
            guess = 0.1801410 + square * (-0.0851330 + square * 0.0208351)
            guess = ratio * (0.9998660 + square * (-0.3302995 + square * guess))
            guess = tl.where(ay > ax, two_pi / 4 - guess, guess)
            guess = tl.where(x < 0, two_pi / 2 - guess, guess)
            guess = tl.where(y < 0, -guess, guess)
            c = tl.cos(guess)
            s = tl.sin(guess)
            angle = guess + (c * y - s * x) / tl.sqrt(squared)
            angle = tl.where(angle < 0, angle + two_pi, angle)
            reached = angle / two_pi * N - REACH
            # Entries of the row before that place: coarse probes, then the stretch between two.
            own = places + row * width
            stride = (length + PROBES - 1) // PROBES
            coarse = probes * stride
            inside = coarse < length
            found = tl.load(own + coarse, mask=inside, other=0).to(tl.float64) < reached
            passed = tl.sum((found & inside).to(tl.int32), 0)
            first = tl.maximum(passed - 1, 0) * stride + 1
            inside = (probes < (stride - 1) * tl.minimum(passed, 1)) & (first + probes < length)
            found = tl.load(own + first + probes, mask=inside, other=0).to(tl.float64) < reached
            fine = tl.sum((found & inside).to(tl.int32), 0)
            skip = tl.where(passed > 0, first + fine, 0)
            skip = tl.where(skip >= length, 0, skip)
            tl.store(skips + row, skip)
        mine = lanes == worker
        begin = tl.where(mine, now + START_TICKS, begin)
        end = tl.where(mine, now + START_TICKS + length.to(tl.int64) * BLOCK_TICKS, end)
        base = tl.where(mine, row * width, base)
        extent = tl.where(mine, length, extent)
        offset = tl.where(mine, skip, offset)


def _gate(gate, unused):
    """A gate as kernels take it: state, turn."""
    return (unused, 0) if gate is None else (gate.state, gate.turn)


def launch_list_schedule(length, wave, block_ticks, start_ticks, gate=None):
    """Starts int64 and workers int32 of the rows of several launches, ``[launches, rows]``."""
    starts = torch.empty_like(length, dtype=torch.int64)
    workers = torch.empty_like(length, dtype=torch.int32)
    lanes = triton.next_power_of_2(wave)
    with on_device(length):
        list_schedule[(length.shape[0],)](
            length, starts, workers, *_gate(gate, workers), length.shape[1], wave, block_ticks,
            start_ticks, LANES=lanes, GATED=gate is not None, num_warps=max(1, min(8, lanes // 64)),
        )  # fmt: skip
    return starts, workers


@functools.cache
def _circle(columns: int, device: torch.device):
    angles = [2.0 * math.pi * place / columns for place in range(columns)]
    return tuple(
        torch.tensor([f(a) for a in angles], dtype=torch.float64, device=device)
        for f in (math.cos, math.sin)
    )


def launch_phases(
    order, counts, lengths, places, phased, wave, columns, block_ticks, start_ticks, gate=None
):
    """`entry_skips` (wavealign.planning.phases) on a GPU.

    Raises:
        InputError: more rows in flight, or more K/V blocks, than the kernels are made for.
    """
    if wave > MOST_WORKERS or columns > _PROBES**2:
        raise InputError(
            f"phased for {wave} rows in flight and {columns} K/V blocks; expected at most "
            f"{MOST_WORKERS} and {_PROBES**2}."
        )
    H, M = order.shape
    starts, workers = launch_list_schedule(
        lengths.view(1, H * M), wave, block_ticks, start_ticks, gate
    )
    skips = torch.zeros(H, M, dtype=torch.int32, device=order.device)
    lanes = triton.next_power_of_2(wave)
    cosines, sines = _circle(columns, order.device)
    with on_device(order):
        enter_passes[(H,)](
            order, counts, places, phased.view(torch.uint8), starts, workers, cosines, sines, skips,
            *_gate(gate, skips), M, columns, places.shape[-1], block_ticks, start_ticks,
            LANES=lanes, PROBES=_PROBES, REACH=REACH_PLACES, GATED=gate is not None,
            num_warps=max(1, min(8, lanes // 64)),
        )  # fmt: skip
    return skips
