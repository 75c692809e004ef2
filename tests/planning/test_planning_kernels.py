"""The planner's Triton kernels without a GPU, and that planning never waits for the device."""

import numpy as np
import pytest
from helpers import run_interpreted

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from wavealign.planning import Planner  # noqa: E402

# Each of them makes the host wait, or has a result whose size the host must learn.
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "item",
    "_linalg_eigh",
    "equal",
)


class Watch(TorchDispatchMode):
    """Fails on an operation that would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        assert name not in WAITS, f"{name} waits for the device"
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a bool index"
        if name == "_to_copy":
            assert (kwargs or {}).get("device") is None, "a copy between devices"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "policy", ["original", "nnz", "nnz-dealt", "svd+nnz", "nnz-wave/shuffled+sawtooth"]
)
def test_planning_waits_for_nothing(policy):
    mask = torch.from_numpy(np.random.default_rng(0).random((3, 20, 30)) < 0.4)
    planner = Planner(mask.shape, "cpu", wave=4)
    planner(mask, policy)  # copies what is drawn on the host, once
    with Watch():
        planner(mask, policy)


def test_triton_kernels_equal_the_torch_operations():
    pytest.importorskip("triton")
    assert run_interpreted("interpreted_planning.py") == "equal"


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["svd+nnz", "lockstep", "nnz/shuffled+sawtooth"])
def test_planning_on_a_gpu_equals_the_cpu_and_can_be_captured(policy):
    rng = np.random.default_rng(5)
    shape = (4, 300, 280)
    masks = [torch.from_numpy(rng.random(shape) < rng.random((4, 300, 1))) for _ in range(2)]
    expected = [Planner(shape, "cpu", wave=132)(mask, policy).to_schedule() for mask in masks]
    planner = Planner(shape, "cuda", wave=132)
    buffer = masks[0].cuda()
    made = planner(buffer, policy)
    assert np.array_equal(made.to_schedule().indices, expected[0].indices) or policy == "svd+nnz"
    made.to_schedule()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        planner(buffer, policy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = planner(buffer, policy)
    buffer.copy_(masks[1])
    graph.replay()
    schedule = made.to_schedule()
    agree = (schedule.row_order == expected[1].row_order).mean()
    assert agree == 1.0 if policy != "svd+nnz" else agree > 0.9
