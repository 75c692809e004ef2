"""Run by test_planning_kernels in a process of its own: Triton's interpreter must be chosen early.

Launches the planner's Triton kernels on CPU tensors and compares with the torch operations.
"""

import interpreter  # noqa: F401, I001 (before anything that imports triton)

import numpy as np
import torch

from wavealign.guard import on_device, statistics
from wavealign.masks import BlockMask
from wavealign.order.visits import BLOCK_TICKS, START_TICKS
from wavealign.planning import ListLayout, Planner
from wavealign.planning import _list_kernels as lists
from wavealign.planning import _phase_kernels as phases
from wavealign.planning._row_kernels import launch_rows
from wavealign.planning.phases import entry_skips
from wavealign.planning.placing import kinds_of
from wavealign.planning.recipes import recipes_per_head
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
    lengths = counts.gather(-1, order.long())
    wanted = entry_skips(order, counts, lengths, places, phased, wave, N)
    skips = phases.launch_phases(order, counts, lengths, places, phased, wave, N, 2, 1)
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
            got = on_device._on_gpu(mask, wave, capacity, shuffled, None)
            for a, b in zip(got, statistics.mask_statistics(host, wave, capacity), strict=True):
                assert (a.hit_original, a.hit_sawtooth) == (b.hit_original, b.hit_sawtooth), (a, b)
                assert (a.nnz, a.working_set_blocks) == (b.nnz, b.working_set_blocks)
                assert abs(a.tail_original - b.tail_original) < 1e-9, (a, b)
                assert abs(a.tail_nnz - b.tail_nnz) + abs(a.spread - b.spread) < 1e-9


def launched(planner, mask, policies):
    """`Planner.follow` as on a GPU: the same steps by the kernels."""
    recipes = recipes_per_head(policies, planner.shape[0])
    gate = planner._following.gate(tuple(recipe.name for recipe in recipes))
    counts = torch.empty(planner.shape[:2], dtype=torch.int32)
    lists.launch_counts(mask, counts, gate)
    visits = [recipe.visits for recipe in recipes]
    sawtooth, phased = (
        torch.tensor([getattr(v, name) for v in visits]) for name in ("sawtooth", "phased")
    )
    kinds, kv_orders = torch.tensor(kinds_of(recipes)), planner.kv_orders(policies)
    placed = launch_rows(
        counts, kinds, sawtooth, planner.wave, planner.shape[2], planner.layout.gathers,
        planner._table, planner._counts, gate,
    )  # fmt: skip
    skips = torch.zeros_like(counts)
    if any(v.phased for v in visits):
        lists.launch_places(mask, counts, kv_orders, planner._indices, gate)
        skips = phases.launch_phases(
            planner._table, counts, placed.lengths, planner._indices, phased, planner.wave,
            planner.shape[2], BLOCK_TICKS, START_TICKS, gate,
        )  # fmt: skip
    if broken:  # Ctrl-C
        return
    walk = Walk(kv_orders, placed.backwards, skips)
    lists.launch_lists(mask, counts, walk, placed.slots, planner.layout, planner._indices, gate)


phases._PROBES = 256
names = ["original", "nnz-wave/shuffled+sawtooth", "lockstep", "resync", "nnz/shuffled+sawtooth"]
for turn in range(8):
    shape = H, M, N = 2, int(rng.integers(1, 90)), int(rng.integers(1, 30))
    layout = ListLayout("gathered" if turn % 2 else "table")
    followed, oracle = (
        Planner(shape, "cpu", wave=int(w), layout=layout) for w in [rng.integers(1, 9)] * 2
    )
    masks = [torch.from_numpy(rng.random(shape) < rng.random((H, M, 1)) * 1.5 - 0.2) for _ in "ab"]
    policies = [rng.choice(names, H).tolist() for _ in "ab"]
    for step in range(7):
        mask, chosen = masks[rng.integers(2)], policies[int(rng.random() < 0.3)]
        broken = step == 3
        launched(followed, mask, chosen)
        if broken:
            continue
        wanted = oracle(mask, chosen)
        assert torch.equal(followed._table, wanted.table), (turn, step)
        assert torch.equal(followed._counts, wanted.counts)
        assert held(followed._indices, wanted.counts) == held(wanted.indices, wanted.counts)
    followed._indices.fill_(-7)  # nobody does: it shows who writes
    launched(followed, mask.clone(), chosen)
    assert (followed._indices == -7).all()

print("equal")
