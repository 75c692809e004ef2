"""CuTe's compiler runs for one thread at a time; the kernels that need it are stood in for here."""

import sys
import threading
import time
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from wavealign.gpu.inputs import Inputs  # noqa: E402
from wavealign.gpu.registry import registered  # noqa: E402
from wavealign.gpu.sizes import Sizes  # noqa: E402
from wavealign.planning.lists import DeviceSchedule  # noqa: E402

SIZES = Sizes(1, 2, 2, 128, 128, 256, 256, head_dim=64)


class OneAtATime:
    """Called like a kernel; notes whether two threads were ever inside at once."""

    def __init__(self, result):
        self.result, self.inside, self.met = result, 0, False

    def __call__(self, *_, **__):
        self.inside += 1
        self.met |= self.inside > 1
        time.sleep(0.01)
        self.inside -= 1
        return self.result


@pytest.mark.parametrize("name", ["fa4", "cudnn"])
def test_launches_of_all_threads_take_turns(name, monkeypatch):
    kernel = OneAtATime({"o_tensor": None, "lse_tensor": None})
    parts = {
        "flash_attn.cute.interface": {"_flash_attn_fwd": kernel},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": dict},
        "cudnn.block_sparse_attention": {"block_sparse_attention_forward": kernel},
    }
    for module, names in parts.items():
        made = ModuleType(module)
        vars(made).update(names)
        for parent in (module.partition(".")[0], module.rpartition(".")[0]):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, module, made)
    backend = registered(name)
    inputs = Inputs.random(SIZES, "cpu")
    layout = backend.capabilities.layout_for(SIZES)
    lists = DeviceSchedule.full((1, 2, 2), layout, "cpu")
    bound = [backend.bind(SIZES, lists, inputs) for _ in range(6)]
    threads = [threading.Thread(target=each.launch) for each in bound]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not kernel.met
