from __future__ import annotations

from importlib.resources import files

import pytest

from wavealign.errors import InputError
from wavealign.sim import device_names, load_device
from wavealign.sim.devices import profile_toml


def shipped(name="h200"):
    return (files("wavealign.sim") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")


def test_the_devices_that_ship():
    expected = {"h100", "h100-pcie", "h200", "a100", "a100-40gb", "a40", "l40s", "rtx4090", "b200"}
    assert expected <= set(device_names())
    for name in device_names():
        profile = load_device(name)
        assert profile.name == name
        assert profile.l2_effective_bytes <= profile.l2_bytes
        assert profile.kernel(None) is next(iter(profile.kernels.values()))


def test_only_the_h200_claims_to_be_calibrated():
    claims = {
        name: k.calibrated_on for name in device_names() for k in load_device(name).kernels.values()
    }
    assert {name for name, claim in claims.items() if claim} == {"h200"}


def test_tiles_that_are_not_listed_scale_with_their_work():
    kernel = load_device("h200").kernel("fa4")
    assert kernel.step_cycles(128, 128, 128) == kernel.block_cycles[128, 128]
    assert kernel.step_cycles(64, 128, 128) == kernel.block_cycles[64, 128]
    assert kernel.step_cycles(128, 64, 128) == kernel.block_cycles[128, 128] / 2
    assert kernel.step_cycles(64, 64, 64) == kernel.block_cycles[64, 128] / 4


def test_a_profile_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        shipped().replace('name = "h200"', 'name = "mine"').replace("sms = 132", "sms = 7")
    )
    assert (load_device(str(path)).name, load_device(str(path)).sms) == ("mine", 7)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("sms = 132", "", "has no 'sms'"),
        ("sms = 132", "sms = 0", "'sms' is 0; expected a number from 1 up"),
        ("sms = 132", 'sms = "132"', "'sms' is '132'"),
        ("sms = 132", "sms = ", "is not TOML"),
        ("wavealign.device/1", "wavealign.device/2", "has schema"),
        ("l2_bytes =", "l2 =", "has no 'l2_bytes'"),
        ('sms = "device query', 'cores = "device query', "'sms' names no source"),
        (
            "row_start_blocks = 0.45",
            "row_start_blocks = -1",
            "'kernels.fa4.row_start_blocks' is -1",
        ),
        (
            "l2_partitions = 2",
            "l2_partitions = 3",
            "'l2_partitions' is 3; expected a number from 1 to 2",
        ),
        ("cap_w = 700", "cap_w = true", "'power.cap_w' is True"),
        (", cycles = ", ", cycles = -", "positive figures"),
    ],
)
def test_incomplete_profiles(tmp_path, before, after, text):
    content = shipped()
    assert before in content
    path = tmp_path / "mine.toml"
    path.write_text(content.replace(before, after, 1))
    with pytest.raises(InputError, match=text) as caught:
        load_device(str(path))
    assert "mine.toml" in str(caught.value)


def test_a_missing_profile_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_device(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("name", device_names())
def test_profiles_survive_writing(tmp_path, name):
    path = tmp_path / f"{name}.toml"
    path.write_text(profile_toml(load_device(name)), encoding="utf-8")
    assert load_device(str(path)) == load_device(name)
