"""Run by test_gpu_torch in a process of its own: Triton's interpreter must be chosen early.

Our plain Triton kernel by the road that every schedule takes, on CPU tensors.
"""

import interpreter  # noqa: F401, I001 (before anything that imports triton)

import dataclasses

import numpy as np
import torch

from wavealign.gpu.correctness import check_launch, check_poke
from wavealign.gpu.execution import Execution
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.reference import reference_attention
from wavealign.gpu.registry import find_backend
from wavealign.gpu.sizes import Sizes
from wavealign.masks import BlockMask
from wavealign.order import build_schedule
from wavealign.planning import Planner

torch.cuda.get_device_capability = lambda *_: (8, 0)
BLOCK, TOKENS = (64, 64), (4 * 64 - 9, 5 * 64 - 20)

dense = np.random.default_rng(0).random((2, 4, 5)) < 0.5
dense[1, 2] = False
mask, other = (BlockMask.from_dense(d, BLOCK, TOKENS) for d in (dense, dense[:, ::-1]))
backend = find_backend("triton")
for changes in ({"batch": 2}, {"kv_heads": 1}):
    sizes = Sizes.of(mask, head_dim=64, dtype="fp16", **changes)
    data = Inputs.random(sizes, "cpu")
    launch = Execution.of(backend, sizes, build_schedule(mask, "lockstep", 3), data)
    check_launch(launch, reference_attention(mask, data), str(changes))
    check_poke(launch, mask, str(changes))
    every = BlockMask.from_dense(np.ones_like(dense), BLOCK, TOKENS)
    full = backend.bind_dense(sizes, data).launch()[0]
    assert (full - reference_attention(every, data)[0]).abs().max() < 2e-3

sizes = dataclasses.replace(Sizes.of(mask, batch=2, head_dim=64, dtype="fp16"), masks=2)
data = Inputs.random(sizes, "cpu")
own = torch.from_numpy(np.concatenate([dense, dense[:, ::-1]]))
lists = Planner(sizes.shape, "cpu", wave=3)(own, "lockstep")
out, lse = Execution(backend, sizes, lists, data).attend()
for b, its in enumerate((mask, other)):
    wanted, wanted_lse = reference_attention(its, data.sequence(b))
    assert (out[b] - wanted[0]).abs().max() < 2e-3
    assert torch.allclose(lse[b], wanted_lse[0], atol=1e-3)

print("equal")
