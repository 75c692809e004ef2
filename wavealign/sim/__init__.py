"""The simulator: device profiles, streaming dispatch, a shared L2."""

from wavealign.sim.devices import DeviceProfile, device_names, load_device
from wavealign.sim.setup import Setup
from wavealign.sim.simulate import run_schedule, simulate

__all__ = ["DeviceProfile", "Setup", "device_names", "load_device", "run_schedule", "simulate"]
