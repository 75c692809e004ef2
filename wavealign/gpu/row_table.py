"""Our own block-sparse kernels, which take the row order as a table: nothing is moved.

On Hopper a Gluon kernel runs (TMA, warp specialisation), elsewhere a plain Triton one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavealign._devices import on_device
from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.sizes import Sizes
from wavealign.planning.lists import DeviceSchedule


class TritonRows(Backend):
    """A CTA looks its query block up in a table, and can say when and where it ran."""

    name = "triton"
    title = "WaveAlign's Triton kernels, row order as a table"
    needs = (("triton", "gpu"),)
    distribution = "triton"
    capabilities = Capabilities(
        blocks=((128, 128), (64, 128), (128, 64), (64, 64)),
        dtypes=("bf16", "fp16"), head_dims=(64, 128), compute_capability=((8, 0), (9, 0)),
    )  # fmt: skip

    def rows_per_sm(self, sizes: Sizes) -> int:
        """See `Backend.rows_per_sm`: on Hopper two CTAs of 64 rows share an SM."""
        if not is_hopper():
            return 1
        from wavealign.gpu._hopper_kernels import CTA_SHAPES

        return CTA_SHAPES[sizes.block_q].ctas_per_sm

    def takes_strides(self) -> bool:
        """See `Backend.takes_strides`: the Gluon kernel's descriptors have them."""
        return is_hopper()

    def bind(self, sizes: Sizes, lists: DeviceSchedule, inputs: Inputs) -> BoundKernel:
        """See `Backend.bind`."""
        return _bound(sizes, lists, inputs)

    def trace(self, sizes: Sizes, lists: DeviceSchedule, inputs: Inputs) -> Tensor:
        """Run once and say when and where each CTA ran.

        Args:
            sizes, lists, inputs: see `Backend.bind`.

        Returns:
            int64 ``[B * H * M, 3]`` in launch order: start and end in ns of the GPU's timer, and
            the SM's number. Tracing slows the kernel.
        """
        rows = sizes.batch * sizes.H * sizes.M
        record = torch.zeros(rows, 3, dtype=torch.int64, device=inputs.q.device)
        with on_device(record):
            _bound(sizes, lists, inputs, record).launch()
        return record


def is_hopper() -> bool:
    """Whether the Gluon kernel runs on the current GPU: it takes tensors of any strides."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def _bound(
    sizes: Sizes, lists: DeviceSchedule, inputs: Inputs, record: Tensor | None = None
) -> BoundKernel:
    q, k, v = inputs.q, inputs.k, inputs.v
    arrays = (lists.table, lists.counts, lists.starts, lists.indices)
    B, tokens, H, D = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(B, H, tokens, dtype=torch.float32, device=q.device)
    scale_log2 = math.log2(math.e) / math.sqrt(D)

    def launch_hopper() -> tuple[Tensor, Tensor]:
        from wavealign.gpu._hopper_kernels import attend_rows_hopper

        attend_rows_hopper(
            q, k, v, out, lse, *arrays, record, scale_log2, sizes.block_q, sizes.block_kv
        )
        return out, lse

    def launch_plain() -> tuple[Tensor, Tensor]:
        from wavealign.gpu._triton_kernels import attend_rows

        # What shared memory allows: 164 KiB on an A100, 100 KiB on other Ampere and Ada cards.
        tile = 64 if torch.cuda.get_device_capability(q.device) == (8, 0) else 32
        with on_device(q):
            attend_rows[(sizes.M, H, B)](
                q, k, v, out, lse, *arrays, lists.starts if record is None else record,
                scale_log2, tokens, sizes.tokens_kv, H, k.shape[2],
                D=D, BLOCK_Q=sizes.block_q, BLOCK_KV=sizes.block_kv, TILE=tile,
                RAGGED=sizes.ragged_kv, TRACE=record is not None, STAGES=2,
                num_warps=8 if sizes.block_q == 128 else 4,
            )  # fmt: skip
        return out, lse

    return BoundKernel(launch_hopper if is_hopper() else launch_plain, (out, lse))
