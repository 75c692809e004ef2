"""Measuring without a GPU: a backend on the CPU, a clock that ticks, the readings of a card."""

from __future__ import annotations

import contextlib
import math

import torch

from wavealign.gpu import registry
from wavealign.gpu.backend import Backend, BoundKernel
from wavealign.gpu.capabilities import Capabilities
from wavealign.gpu.reference import attend_tokens
from wavealign.gpu.rig import Rig
from wavealign.gpu.telemetry import DeviceState, Summary

TICK_S = 0.125
"""A power of two: sums of it are exact."""


class TickingRig(Rig):
    """The CPU by a clock that goes on by a tick whenever it is read: a launch takes 125 ms.

    Attributes:
        turns: of the launches that were timed apart from each other.
    """

    def __init__(self):
        super().__init__()
        self.now, self.turns = 0.0, []

    def seconds(self):
        self.now += TICK_S
        return self.now

    def pauser(self):
        return self.turns.append


class Readings:
    """A card that takes 100 J in each interval that is sampled."""

    def __init__(self, name="NVIDIA H200", energy_j=100.0, throttle=("a", "b")):
        self.name, self.summary_ = name, Summary(1.0, 3, 1.5, 650.0, 70.0, throttle, energy_j)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self):
        return DeviceState(self.name, "580.1", 1.9, 3.2, 600.0, 700.0, 60.0, (), 1.0)

    @contextlib.contextmanager
    def sample(self):
        yield self

    def summary(self):
        return self.summary_


class _Reference(Backend):
    """Row after row over its list, in float32."""

    name, title, needs, distribution = "reference", "on the CPU", (), "torch"
    capabilities = Capabilities(
        blocks=((8, 16),),
        dtypes=("bf16", "fp16"),
        head_dims=(16,),
        compute_capability=((0, 0), (99, 0)),
        walks="forwards",
        rows="table",
    )

    def bind(self, problem, lists, inputs):
        rows = problem.mask.H * problem.mask.M
        spans = [lists.indices[lists.indptr[r] : lists.indptr[r + 1]] for r in range(rows)]
        return self._bound(problem, inputs, spans)

    def bind_dense(self, problem, inputs):
        mask = problem.mask
        return self._bound(problem, inputs, [range(mask.N)] * (mask.H * mask.M))

    def _bound(self, problem, inputs, spans):
        mask, scale = problem.mask, 1 / math.sqrt(problem.head_dim)
        out = torch.empty_like(inputs.q)
        lse = torch.empty(problem.batch, mask.H, mask.tokens_q)

        def launch():
            for row, blocks in enumerate(spans):
                h, i = divmod(row, mask.M)
                tokens = slice(i * mask.block_q, min((i + 1) * mask.block_q, mask.tokens_q))
                out[:, tokens, h], lse[:, h, tokens] = 0, -math.inf
                kept = [b * mask.block_kv + t for b in blocks for t in range(mask.block_kv)]
                kept = torch.tensor([t for t in kept if t < mask.tokens_kv], dtype=torch.long)
                if len(kept):
                    head = h // problem.heads_per_kv_head
                    q, k, v = (
                        t.float()
                        for t in (
                            inputs.q[:, tokens, h],
                            inputs.k[:, :, head],
                            inputs.v[:, :, head],
                        )
                    )
                    part, part_lse = attend_tokens(q, k, v, kept, scale)
                    out[:, tokens, h], lse[:, h, tokens] = part.to(out.dtype), part_lse
            return out, lse

        return BoundKernel(launch, (out, lse))


def register(set_attribute=setattr):
    """Have the registry know the backend `reference`."""
    if "reference" not in registry.BACKEND_NAMES:
        set_attribute(registry, "BACKEND_NAMES", (*registry.BACKEND_NAMES, "reference"))
        set_attribute(registry, "backends", lambda: [_Reference()])
