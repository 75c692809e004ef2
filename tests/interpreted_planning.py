"""Run by test_planning_kernels in a process of its own: Triton's interpreter must be chosen early.

Launches the planner's Triton kernels on CPU tensors and compares with the torch operations.
"""

import interpreter  # noqa: F401, I001 (before anything that imports triton)

import numpy as np
import torch

from wavealign.guard import on_device, statistics
from wavealign.masks import BlockMask
from wavealign.planning import ListLayout, Planner
from wavealign.planning import _list_kernels as lists
from wavealign.planning import _phase_kernels as phases
from wavealign.planning.phases import entry_skips
from wavealign.planning.visits import Walk, write_lists, write_places

rng = np.random.default_rng(1)
ROUNDS = 3


def permutations(count, size):
    return torch.from_numpy(np.stack([rng.permutation(size) for _ in range(count)]).astype("i4"))


def held(array, counts):
    return [row[:n].tolist() for row, n in zip(array.flatten(0, -2), counts.flatten(), strict=True)]


for turn in range(ROUNDS):
    H, M, N = int(rng.integers(1, 3)), int(rng.integers(1, 10)), int(rng.integers(1, 40))
    wave = int(rng.integers(1, 7))
    dense = rng.random((H, M, N)) < rng.random((H, M, 1)) * 1.5 - 0.2
    mask = torch.from_numpy(dense)
    counts = mask.sum(-1, dtype=torch.int32)
    kv_orders, order = permutations(H, N), permutations(H, M)
    slots = torch.argsort(order, dim=-1)

    expected, made = (
        torch.zeros(H, M, N, dtype=torch.int32),
        torch.zeros(H, M, N, dtype=torch.int32),
    )
    write_places(mask, counts, kv_orders, expected)
    lists.launch_places(mask, counts, kv_orders, made)
    assert held(made, counts) == held(expected, counts)
    places = expected

    phased = torch.from_numpy(rng.random(H) < 0.8)
    phases._PROBES = 8 if turn % 2 else 256  # so that a row takes several probes' stretches
    wanted = entry_skips(order, counts, places, phased, wave, N)
    skips = phases.launch_phases(order, counts, places, phased, wave, N, 2, 1)
    assert torch.equal(skips, wanted), (turn, skips, wanted)

    layout = ListLayout(
        "gathered" if turn % 2 else "table",
        "backwards" if turn % 3 else "forwards",
        bool(turn % 4 // 2),
    )
    walk = Walk(kv_orders, torch.from_numpy(rng.random((H, M)) < 0.5), skips)
    by_slot = counts.gather(-1, order.long()) if layout.rows == "gathered" else counts
    expected, made = (
        torch.zeros(H, M, N, dtype=torch.int32),
        torch.zeros(H, M, N, dtype=torch.int32),
    )
    write_lists(mask, counts, walk, slots, layout, expected)
    lists.launch_lists(mask, counts, walk, slots, layout, made)
    assert held(made, by_slot) == held(expected, by_slot), turn
    if turn % 3 == 2:
        shuffled = Planner((H, M, N), "cpu", wave=wave).kv_orders("nnz/shuffled")
        host = BlockMask.from_dense(dense)
        on_device.SNAPSHOTS = statistics.SNAPSHOTS = 3
        for capacity in (3,):
            got = on_device._on_gpu(mask, wave, capacity, shuffled)
            for a, b in zip(got, statistics.mask_statistics(host, wave, capacity), strict=True):
                assert (a.hit_original, a.hit_sawtooth) == (b.hit_original, b.hit_sawtooth), (a, b)
                assert (a.nnz, a.working_set_blocks) == (b.nnz, b.working_set_blocks)
                assert abs(a.tail_original - b.tail_original) < 1e-9, (a, b)
                assert abs(a.tail_nnz - b.tail_nnz) + abs(a.spread - b.spread) < 1e-9

print("equal")
