"""Simulate schedules: `simulate` for one answer, `Setup` for the terms it is asked in.

First model. L2 is one LRU over K/V blocks (K and V of a block together) of the profile's
effective capacity. Rows stream to W workers without a barrier; each block lasts the same time
at the compute limit, plus a stall where it misses and prefetch can't hide it. On top, every
miss costs the launch as a whole a fixed share: HBM reads draw power, power takes clock from
all SMs alike. docs/fidelity.md says how far this can be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wavealign._version import __version__
from wavealign.errors import InputError, unknown_name
from wavealign.masks.block_mask import BlockMask
from wavealign.order.policies import build_schedule
from wavealign.order.schedule import Schedule
from wavealign.results import RunResult
from wavealign.sim.devices import (
    DEFAULT_DEVICE,
    DeviceProfile,
    KernelProfile,
    load_device,
)
from wavealign.units import format_heads

DTYPE_BYTES = {"bf16": 2, "fp16": 2}

_TICKS_PER_BLOCK = 128
"""Resolution of the event loop: a stall or a row start is rounded to 1/128 of a block."""


@dataclass(frozen=True)
class Setup:
    """The terms of a simulation.

    Attributes:
        device: profile.
        kernel: its kernel.
        wave: rows in flight, W.
        l2_capacity_bytes: what the LRU holds.
        l2_origin: where that capacity is from, in words.
        head_dim: elements per head.
        dtype: of K and V.
    """

    device: DeviceProfile
    kernel: KernelProfile
    wave: int
    l2_capacity_bytes: int
    l2_origin: str
    head_dim: int
    dtype: str

    @classmethod
    def make(
        cls,
        device: str = DEFAULT_DEVICE,
        kernel: str | None = None,
        *,
        l2_bytes: int | None = None,
        wave: int | None = None,
        head_dim: int = 128,
        dtype: str = "bf16",
    ) -> Setup:
        """Resolve names and overrides.

        Args:
            device: profile name, or path to a TOML file.
            kernel: kernel name of that profile; by default its first.
            l2_bytes: capacity of the LRU, all of it usable; by default the profile's effective
                capacity.
            wave: rows in flight; by default SMs x CTAs per SM.
            head_dim: elements per head.
            dtype: ``"bf16"`` or ``"fp16"``.

        Raises:
            InputError: unknown names or sizes below 1.
        """
        profile = load_device(device)
        entry = profile.kernel(kernel)
        if dtype not in DTYPE_BYTES:
            raise unknown_name("dtype", dtype, DTYPE_BYTES)
        for name, value in (("wave", wave), ("head_dim", head_dim), ("l2_bytes", l2_bytes)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; expected at least 1.")
        return cls(
            profile,
            entry,
            wave or profile.sms * entry.ctas_per_sm,
            l2_bytes or profile.l2_effective_bytes,
            "given" if l2_bytes else f"effective capacity of {profile.name}",
            head_dim,
            dtype,
        )

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V of one head for so many tokens."""
        return 2 * tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    def capacity_blocks(self, mask: BlockMask) -> int:
        """Whole K/V blocks that L2 holds.

        Raises:
            InputError: not even one.
        """
        block_bytes = self.kv_bytes(mask.block_kv)
        if self.l2_capacity_bytes < block_bytes:
            raise InputError(
                f"an L2 of {self.l2_capacity_bytes} bytes ({self.l2_origin}) is smaller than one "
                f"K/V block of {block_bytes} bytes ({mask.block_kv} tokens x {self.head_dim} x 2 "
                f"x {DTYPE_BYTES[self.dtype]}); expected at least one block."
            )
        return self.l2_capacity_bytes // block_bytes


def simulate(
    mask: BlockMask,
    policy: str | Schedule = "original",
    device: str = DEFAULT_DEVICE,
    kernel: str | None = None,
    *,
    l2_bytes: int | None = None,
    wave: int | None = None,
    head_dim: int = 128,
    dtype: str = "bf16",
    seed: int = 0,
    name: str = "",
) -> RunResult:
    """Run all heads of a mask as one launch, in the simulator.

    Args:
        mask: the block mask.
        policy: a policy's name (``wavealign policies`` lists them) or a `Schedule`.
        device, kernel, l2_bytes, wave, head_dim, dtype: see `Setup.make`.
        seed: of every random choice.
        name: the mask's name in the result.

    Returns:
        The result row; fields that this model can't give are None.

    Raises:
        InputError: unknown names, or a schedule that isn't this mask's.
    """
    setup = Setup.make(device, kernel, l2_bytes=l2_bytes, wave=wave, head_dim=head_dim, dtype=dtype)
    if isinstance(policy, Schedule):
        policy.check(mask)
        schedule = policy
    else:
        schedule = build_schedule(mask, policy, setup.wave, seed)
    return run_schedule(mask, schedule, setup, seed=seed, name=name)


def run_schedule(
    mask: BlockMask,
    schedule: Schedule,
    setup: Setup,
    *,
    seed: int = 0,
    name: str = "",
    heads: str | None = None,
    head: int | None = None,
) -> RunResult:
    """Simulate a schedule that is known to fit the mask (see `Schedule.check`).

    `heads` and `head` say which heads of the mask's file these are (see `RunResult`).
    """
    from wavealign.sim._kernels import stream_lru

    capacity = setup.capacity_blocks(mask)
    block_ns = setup.kernel.step_ns(mask.block_q, mask.block_kv, setup.head_dim)
    ticks = _TICKS_PER_BLOCK
    misses, last_block_misses, end_ticks = stream_lru(
        schedule.row_order,
        schedule.indptr,
        schedule.indices,
        mask.N,
        setup.wave,
        capacity,
        ticks,
        ticks + round(setup.kernel.miss_stall_ns / block_ns * ticks),
        round(setup.kernel.row_start_blocks * ticks),
    )
    requested = _bytes(mask, setup, mask.nnz, int(np.count_nonzero(mask.indices == mask.N - 1)))
    read = _bytes(mask, setup, int(misses.sum()), int(last_block_misses.sum()))
    touched, touches_last = mask.touched_kv_blocks
    makespan_ns = int(end_ticks.max()) * block_ns / ticks
    # Misses slow the launch as a whole, not the row that missed: were it the row, leaders of a
    # sweep would wait for their followers and hit ratios come out too high (docs/fidelity.md).
    shared_ns = int(misses.sum()) * setup.kernel.miss_shared_ns / setup.wave
    hbm_ns = read / setup.device.hbm_bytes_per_s * 1e9
    return RunResult(
        source="simulated",
        policy=schedule.policy,
        mask=name,
        mask_digest=mask.digest,
        heads=heads if heads is not None else format_heads(range(mask.H)),
        head=head,
        device=setup.device.name,
        kernel=setup.kernel.name,
        seed=seed,
        wave=setup.wave,
        l2_capacity_bytes=setup.l2_capacity_bytes,
        kv_block_bytes=setup.kv_bytes(mask.block_kv),
        time_ms=max(makespan_ns + shared_ns, hbm_ns) / 1e6,
        l2_hit_frac=1.0 - read / requested if requested else None,
        lts_sector_hit_frac=None,
        l2_requested_bytes=requested,
        hbm_read_bytes=read,
        compulsory_bytes=_bytes(mask, setup, int(touched.sum()), int(touches_last.sum())),
        imbalance_frac=(
            1.0 - float(end_ticks.mean()) / int(end_ticks.max()) if end_ticks.max() else 0.0
        ),
        clock_ghz=None,
        energy_j=None,
        bound="hbm" if hbm_ns > makespan_ns + shared_ns else None,
        version=__version__,
    )


def _bytes(mask: BlockMask, setup: Setup, blocks: int, last_blocks: int) -> int:
    """Bytes of `blocks` K/V blocks of which `last_blocks` are the (ragged) last one."""
    full = setup.kv_bytes(mask.block_kv)
    return (blocks - last_blocks) * full + last_blocks * setup.kv_bytes(mask.last_kv_tokens)
