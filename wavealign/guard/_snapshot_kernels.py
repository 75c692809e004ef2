"""Triton kernel of the guard's snapshots: one program a head and moment."""

# triton.jit functions are not Python that mypy can follow: see pyproject.toml.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wavealign._devices import on_device

NEVER = 2**30
"""Age of a block that no row in the window has read."""


@triton.jit
def look(
    mask, order, counts, kv_orders, starts, times, age_out, wanted_out, running_out,
    M, N, wave, window, BLOCK_TICKS, START_TICKS,
    SAWTOOTH: tl.constexpr, LANES: tl.constexpr, NEVER: tl.constexpr,
):  # fmt: skip
    """How long ago each block of a head was read, and whether a row reads it next.

    mask uint8 ``[H, M, N]``; order, counts int32 ``[H, M]``; kv_orders int32 ``[H, N]``; starts
    int64 ``[H, M]`` by slot, never falling; times int64 ``[H, S]``; out: age int32 and wanted uint8
    ``[H, S, N]`` by place in the K/V order, running int32 ``[H, S]``.
    """
    moment = tl.program_id(0)
    head = tl.program_id(1)
    entry = head * tl.num_programs(0) + moment
    now = tl.load(times + entry)
    # The first slot that starts later.
    low = tl.zeros([], tl.int32)
    high = tl.zeros([], tl.int32) + M
    while low < high:
        middle = (low + high) // 2
        later = tl.load(starts + head * M + middle) > now
        high = tl.where(later, middle, high)
        low = tl.where(later, low, middle + 1)
    places = tl.arange(0, LANES)
    inside = places < N
    blocks = tl.load(kv_orders + head * N + places, mask=inside, other=0)
    age = tl.full([LANES], NEVER, tl.int32)
    wanted = tl.zeros([LANES], tl.int32)
    running = tl.zeros([], tl.int32)
    for slot in range(tl.maximum(low - window, 0), low):
        row = (head * M + tl.load(order + head * M + slot)).to(tl.int64)
        since = now - tl.load(starts + head * M + slot) - START_TICKS
        since = tl.minimum(since, NEVER - 1).to(tl.int32)
        done = tl.maximum(since, 0) // BLOCK_TICKS
        length = tl.load(counts + row)
        kept = tl.load(mask + row * N + blocks, mask=inside, other=0).to(tl.int32)
        visit = tl.cumsum(kept, 0) - 1
        if SAWTOOTH:
            visit = tl.where(slot // wave % 2 == 1, length - 1 - visit, visit)
        read = (kept != 0) & (visit < done)
        age = tl.minimum(age, tl.where(read, since - visit * BLOCK_TICKS, NEVER))
        wanted = tl.where((kept != 0) & (visit == done), 1, wanted)
        running += (done < length).to(tl.int32)
    tl.store(age_out + entry.to(tl.int64) * N + places, age, mask=inside)
    tl.store(wanted_out + entry.to(tl.int64) * N + places, wanted.to(tl.uint8), mask=inside)
    tl.store(running_out + entry, running)


def launch_snapshots(
    mask, order, counts, kv_orders, starts, wave, window, moments, capacity, block_ticks,
    start_ticks, sawtooth,
):  # fmt: skip
    """Requests and misses at evenly spaced moments of each head's launch: int64 ``[H, 2]``.

    mask: bool ``[H, M, N]``; order, counts: int32 ``[H, M]``; kv_orders: int32 ``[H, N]``; starts:
    int64 ``[H, M]`` by slot.
    """
    H, M, N = mask.shape
    length = counts.gather(-1, order.long())
    begin = starts[:, :1]
    makespan = (starts + start_ticks + block_ticks * length).amax(-1, keepdim=True) - begin
    steps = 2 * torch.arange(moments, dtype=torch.int64, device=mask.device) + 1
    times = (begin + steps * makespan // (2 * moments)).contiguous()
    age = torch.empty(H, moments, N, dtype=torch.int32, device=mask.device)
    wanted = torch.empty(H, moments, N, dtype=torch.uint8, device=mask.device)
    running = torch.empty(H, moments, dtype=torch.int32, device=mask.device)
    lanes = triton.next_power_of_2(N)
    with on_device(mask):
        look[(moments, H)](
            mask.view(torch.uint8), order, counts, kv_orders, starts, times, age, wanted, running,
            M, N, wave, window, block_ticks, start_ticks,
            SAWTOOTH=sawtooth, LANES=lanes, NEVER=NEVER, num_warps=min(16, max(1, lanes // 512)),
        )  # fmt: skip
    # The numba twin's "never" is larger than any age too; where all of L2 isn't filled, a block
    # that was read at all is in it.
    limit = age.sort(-1).values[..., min(capacity, N - 1)][..., None] if capacity < N else NEVER
    misses = ((wanted != 0) & (age >= limit)).sum((1, 2))
    return torch.stack([running.sum(1).long(), misses], dim=1)
