"""What decides a plan besides the mask."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from wavealign.attention.backends import rows_in_flight
from wavealign.errors import InputError, unknown_name
from wavealign.foreign import shown
from wavealign.gpu.backend import Backend
from wavealign.gpu.registry import BACKEND_NAMES
from wavealign.gpu.sizes import Sizes
from wavealign.guard.decide import OBJECTIVES, Guard
from wavealign.guard.model import CostModel
from wavealign.numbers import text, whole_number
from wavealign.planning.recipes import Recipe
from wavealign.sim.devices import device_of_gpu, load_device

_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Terms:
    """What decides a plan besides the mask.

    Attributes:
        policy: ``"auto"`` (the guard decides) or one for all heads.
        device_profile: a device's name or path; None for the GPU at hand.
        backend: see `choose_backend`.
        objective: the guard's, ``"time"`` or ``"energy"``.
        seed: of the shuffled K/V orders.

    Raises:
        InputError: unknown names.
    """

    policy: str = "auto"
    device_profile: str | None = None
    backend: str = "auto"
    objective: str = "time"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("policy", "backend", "objective"):
            text(name, getattr(self, name))
        whole_number("seed", self.seed)
        if self.policy != "auto":
            Recipe.parse(self.policy)
        if self.backend not in (backends := ("auto", *BACKEND_NAMES)):
            raise unknown_name("backend", self.backend, backends)
        if self.objective not in OBJECTIVES:
            raise unknown_name("objective", self.objective, OBJECTIVES)
        if self.device_profile is not None:
            object.__setattr__(self, "device_profile", str(self.device_profile))
            load_device(str(self.device_profile))

    def guard(
        self, backend: Backend, sizes: Sizes, regime: str, close_frac: float | None = None
    ) -> Guard:
        """A guard for launches of these sizes.

        Args:
            backend, sizes: of the launches.
            regime, close_frac: see `CostModel.make` and `Guard`.

        Raises:
            InputError: no profile for this GPU, and none given.
        """
        device = load_device(profile_name(self.device_profile))
        kernel = backend.name if backend.name in device.kernels else None
        # A block's cycles hold for the rows in flight that the profile's kernel has.
        wave = rows_in_flight(backend, sizes) if kernel is not None else None
        model = CostModel.make(device, kernel, wave=wave, head_dim=sizes.head_dim, regime=regime)
        return Guard(model, self.objective, close_frac)

    def wave(self, backend: Backend, sizes: Sizes) -> int:
        """Rows in flight: of the GPU, or of the profile where nothing runs on one."""
        found = rows_in_flight(backend, sizes)
        return found or CostModel.make(profile_name(self.device_profile)).setup.wave


def profile_name(given: str | None) -> str:
    """The device profile to plan by; warns once where it is another GPU's.

    Raises:
        InputError: none given, and no GPU, or one without a profile.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    own = device_of_gpu(gpu) if gpu else None
    if given is None:
        if own is None:
            # Without a GPU a policy needs a profile, too: for the rows in flight.
            rest = ", or a policy instead of 'auto'" if gpu else ""
            raise InputError(
                f"no device profile for {gpu or 'this machine, which has no NVIDIA GPU'}; name one "
                "of `wavealign devices` (attend and plan: device_profile='h200', else "
                f"profile='h200'){rest}."
            )
        return own
    named = load_device(given).name
    if gpu is not None and own != named and (given, gpu) not in _warned:
        _warned.add((given, gpu))
        warnings.warn(
            f"planning by profile '{shown(given)}' on a {gpu}.", UserWarning, stacklevel=4
        )
    return given
