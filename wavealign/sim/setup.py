"""The terms of a simulation: device, kernel, L2, model and regime, resolved from their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from wavealign.errors import InputError, unknown_name
from wavealign.masks.block_mask import BlockMask
from wavealign.runs.launch import Launch, Model, Regime
from wavealign.sim.devices import DEFAULT_DEVICE, DeviceProfile, KernelProfile, load_device
from wavealign.sim.power import REGIMES, Timing, Work, clock_and_energy
from wavealign.units import format_heads

MODELS: tuple[Model, ...] = ("full", "fast")

DTYPE_BYTES = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Setup:
    """The terms of a simulation.

    Attributes:
        device: profile.
        kernel: its kernel.
        wave: rows in flight, W.
        l2_capacity_bytes: what the modelled L2 holds, over all partitions.
        l2_origin: where that capacity is from, in words.
        head_dim: elements per head.
        dtype: of K and V.
        model: ``"full"`` (partitions, drift, bandwidth) or ``"fast"`` (one LRU).
        regime: ``"single"`` launch or ``"steady"`` state.
    """

    device: DeviceProfile
    kernel: KernelProfile
    wave: int
    l2_capacity_bytes: int
    l2_origin: str
    head_dim: int
    dtype: str
    model: Model = "full"
    regime: Regime = "single"

    @classmethod
    def make(
        cls, device: str | DeviceProfile = DEFAULT_DEVICE, kernel: str | None = None, *,
        l2_bytes: int | None = None, wave: int | None = None, head_dim: int = 128,
        dtype: str = "bf16", model: str = "full", regime: str = "single",
    ) -> Setup:  # fmt: skip
        """Resolve names and overrides.

        Args:
            device: profile, its name, or path to a TOML file.
            kernel: kernel name of that profile; by default its first.
            l2_bytes: capacity of the modelled L2, all of it usable; by default what the
                profile says of this model.
            wave: rows in flight; by default SMs x CTAs per SM.
            head_dim: elements per head.
            dtype: ``"bf16"`` or ``"fp16"``.
            model: ``"full"`` or ``"fast"``.
            regime: ``"single"`` or ``"steady"``.

        Raises:
            InputError: unknown names or sizes below 1.
        """
        profile = device if isinstance(device, DeviceProfile) else load_device(device)
        entry = profile.kernel(kernel)
        for kind, name, valid in (
            ("dtype", dtype, tuple(DTYPE_BYTES)),
            ("model", model, MODELS),
            ("regime", regime, REGIMES),
        ):
            if name not in valid:
                raise unknown_name(kind, name, valid)
        for name, value in (("wave", wave), ("head_dim", head_dim), ("l2_bytes", l2_bytes)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; expected at least 1.")
        if l2_bytes is not None:
            capacity, origin = l2_bytes, "given"
        elif model == "full":
            capacity = round(profile.l2_bytes * profile.l2_usable_frac)
            parts = f", {profile.l2_partitions} partitions" if profile.l2_partitions > 1 else ""
            origin = f"usable L2 of {profile.name}{parts}"
        else:
            capacity, origin = profile.l2_effective_bytes, f"effective capacity of {profile.name}"
        wave = wave or profile.sms * entry.ctas_per_sm
        return cls(
            profile, entry, wave, capacity, origin, head_dim, dtype,
            cast(Model, model), cast(Regime, regime),
        )  # fmt: skip

    @classmethod
    def of(cls, launch: Launch, device: DeviceProfile | None = None) -> Setup:
        """The terms of a launch, on this profile or on that of ``launch.device``.

        Raises:
            InputError: as `make`, or a launch that doesn't say how large its heads are.
        """
        if launch.head_dim is None or launch.dtype is None:
            raise InputError(
                "the launch doesn't say its head_dim and dtype (its file is of an earlier version)."
            )
        return cls.make(
            device or launch.device, launch.kernel,
            l2_bytes=launch.l2_bytes, wave=launch.wave,
            head_dim=launch.head_dim, dtype=launch.dtype,
            model=launch.model or "full", regime=launch.regime,
        )  # fmt: skip

    def launch(
        self, mask: BlockMask, policy: str, seed: int = 0, name: str = "", heads: str | None = None,
        head: int | None = None,
    ) -> Launch:  # fmt: skip
        """What a simulated run on these terms is.

        Args:
            mask: the heads that run.
            policy: recipe of the schedule.
            seed: of every random choice.
            name: the mask's name.
            heads, head: which heads of the mask's file these are; by default all of them.
        """
        return Launch(
            source="simulated",
            mask=name, mask_digest=mask.digest,
            heads=heads if heads is not None else format_heads(range(mask.H)), head=head,
            policy=policy, wave=self.wave, seed=seed,
            device=self.device.name, device_digest=self.device.digest,
            kernel=self.kernel.name, model=self.model, regime=self.regime,
            l2_bytes=self.l2_bytes, l2_capacity_bytes=self.l2_capacity_bytes,
            kv_block_bytes=self.kv_bytes(mask.block_kv), batch=1, kv_heads=mask.H,
            head_dim=self.head_dim, dtype=self.dtype,
            tokens_kv=mask.tokens_kv, density=mask.density,
        )  # fmt: skip

    @property
    def l2_bytes(self) -> int | None:
        """The L2 that was asked for; None for the device's own."""
        return self.l2_capacity_bytes if self.l2_origin == "given" else None

    @property
    def partitions(self) -> int:
        """L2 partitions of the model."""
        return self.device.l2_partitions if self.model == "full" else 1

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V of one head for so many tokens."""
        return 2 * tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    def capacity_blocks(self, mask: BlockMask) -> int:
        """Whole K/V blocks that L2 holds (each once, without copies).

        Raises:
            InputError: not even one in every partition.
        """
        block_bytes = self.kv_bytes(mask.block_kv)
        if self.l2_capacity_bytes < block_bytes * self.partitions:
            raise InputError(
                f"an L2 of {self.l2_capacity_bytes} bytes ({self.l2_origin}) is smaller than one "
                f"K/V block of {block_bytes} bytes ({mask.block_kv} tokens x {self.head_dim} x 2 "
                f"x {DTYPE_BYTES[self.dtype]})"
                + (f" in each of {self.partitions} partitions" if self.partitions > 1 else "")
                + "; expected at least that."
            )
        return self.l2_capacity_bytes // block_bytes

    def step_cycles(self, mask: BlockMask) -> float:
        """Cycles of one K/V block of this mask at the compute limit."""
        return self.kernel.step_cycles(mask.block_q, mask.block_kv, self.head_dim)

    def flops(self, mask: BlockMask, blocks: int) -> float:
        """FLOP of so many blocks: two matrix products, a multiply and an add each."""
        return 4.0 * mask.block_q * mask.block_kv * self.head_dim * blocks

    def timing(self, work: Work) -> Timing:
        """Clock, time and energy of a launch."""
        return clock_and_energy(self.device.power, self.device.clock_max_ghz, work, self.regime)
