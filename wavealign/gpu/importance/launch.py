"""`attend_with_importance` on a GPU: lists, scratch memory, rounds of heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavealign._devices import on_device
from wavealign.gpu.importance._kernels import attend_blocks, weigh_blocks
from wavealign.gpu.importance.call import SCRATCH_BYTES, Call, Importance
from wavealign.gpu.inputs import laid_out

_PLACES = 32


@dataclass(frozen=True)
class Tiles:
    """How phase 1 is built.

    Attributes:
        tile: keys at a time; divides block_kv.
        stages: tiles of K and V in flight.
        warps: of a CTA.
        tma: whether tiles are copied by descriptor.
    """

    tile: int
    stages: int
    warps: int
    tma: bool

    @classmethod
    def for_device(cls, call: Call, positions: bool = False) -> Tiles:
        """What shared memory and registers of the GPU at hand allow, with positions or without."""
        warps = 8 if call.block_q == 128 else 4
        if not call.q.is_cuda:
            return cls(call.block_kv, 1, warps, False)
        capability = torch.cuda.get_device_capability(call.q.device)
        if capability[0] == 9 and call.block_kv == 128 and not positions:
            # A fifth faster than 128 keys at a time in two stages, measured on an H200. Takes 225
            # of its 227 KiB at head_dim 128; positions need some, too.
            return cls(64, 3, warps, True)
        if capability >= (9, 0) and capability[0] != 12:
            return cls(call.block_kv, 2, warps, True)
        # 164 KiB on an A100 (3 stages would take 177), 100 KiB on other Ampere, Ada and small
        # Blackwell cards.
        return cls(64 if capability == (8, 0) else 32, 2, warps, False)


class Search:
    """Both phases of a call, bound to buffers: launching neither allocates nor waits.

    Attributes:
        rounds: (first head, heads) of each launch, heads of all sequences counted through.
        parts: of the query blocks, a launch of phase 1 each: int32 ``[heads of the lists, slots]``,
            slot → query block, and whether they are diagnosed. Where only some are these have a
            launch of their own, so that the others pay for no accumulators; in each the schedule's
            order is kept. Over lists the Hopper kernel has both loops in one launch instead: rows
            stay beside the rows they were scheduled with. Over all blocks every row has the same
            length, and slower ones among them would put the SMs out of step.
        result: what the launches write.
    """

    def __init__(
        self, call: Call, scratch_bytes: int = SCRATCH_BYTES, *, sums: bool = True,
        entropy: bool | None = None, distance: bool | None = None, hopper: bool = False,
        tiles: Tiles | None = None,
    ) -> None:  # fmt: skip
        """Allocate.

        Args:
            call: what Triton takes (`attend_with_importance` checks).
            scratch_bytes: see there.
            sums: write block log-sum-exps; without them phase 1 is plain block-sparse attention.
            entropy, distance: keep these; by default as the call says.
                Of the call's every n-th query block alone.
            hopper: phase 1 by the Gluon kernel for Hopper.
            tiles: of the Triton kernel; by default what suits the GPU at hand.
        """
        self._call = call
        q = call.q
        B, tokens, H, _ = q.shape
        self._tiles = tiles
        self._sums_wanted = sums
        wanted = [call.diagnostics if w is None else w for w in (entropy, distance)]
        self._dense = call.candidates is None and call.schedule is None
        self._hopper = hopper
        table, *self._lists = _lists(call, listed=hopper)
        every = call.diagnose_every if any(wanted) else 1
        together = hopper and not self._dense
        self._every = every if together else 1
        self.parts = _parts(table, 1 if together else every)
        width = call.N if call.schedule is None else call.schedule.indices.shape[-1]
        options: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        head_bytes = 4 * call.block_q * call.M * width
        # The Hopper kernel takes the query heads of a K/V head together.
        unit = H // call.k.shape[2] if hopper else 1
        fit = max(1, scratch_bytes // (head_bytes * unit)) if sums else B * H
        units = B * H // unit
        each = math.ceil(units / math.ceil(units / fit)) * unit
        self.rounds = [(h, min(each, B * H - h)) for h in range(0, B * H, each)]
        self._scratch = torch.empty(each * head_bytes // 4 if sums else 1, **options)
        self._width = width
        diagnosed = [torch.full((B, H, tokens), math.nan, **options) if w else None for w in wanted]
        self.result = Importance(
            torch.empty_like(q, memory_format=torch.contiguous_format),
            torch.empty(B, H, tokens, **options),
            torch.zeros(B, H, call.M, call.N, **options) if sums else q.new_zeros(0),
            *diagnosed,
        )
        reference = call.reference_lse
        self._reference = None if reference is None else reference.float().contiguous()
        self._axes, self._positions = 0, self.result.lse
        if call.positions is not None and wanted[1]:
            self._positions = call.positions.T.float().contiguous()
            self._axes = len(self._positions)
        self._side: Any = None
        if q.is_cuda and len(self.parts) > 1:
            # Ahead of the rest: rows of the sample take longest.
            self._side = torch.cuda.Stream(q.device, priority=-1)
        self._sources = tuple(laid_out(t) for t in (q, call.k, call.v))

    def run(self) -> Importance:
        """Both phases, round after round."""
        for first, heads in self.rounds:
            self.attend(first, heads)
            if self._sums_wanted:
                self.weigh(first, heads)
        return self.result

    def attend(self, first: int, heads: int) -> None:
        """Phase 1 of some heads."""
        launch = self._attend_hopper if self._hopper else self._attend_triton
        if len(self.parts) == 1 or not self._call.q.is_cuda:
            for table, diagnosed in self.parts:
                launch(table, diagnosed, first, heads)
            return
        # Side by side, so that the second launch fills the SMs that the end of the first leaves
        # idle; one after the other, each would end in a partly filled wave.
        device = self._call.q.device
        stream = torch.cuda.current_stream(device)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            launch(*self.parts[0], first, heads)
        launch(*self.parts[1], first, heads)
        stream.wait_stream(self._side)

    def _attend_triton(self, table: Tensor, diagnosed: bool, first: int, heads: int) -> None:
        call, result = self._call, self.result
        axes = self._axes if diagnosed else 0
        tiles = self._tiles or Tiles.for_device(call, axes > 0)
        q, k, v = self._sources
        block_q, block_kv, tile = call.block_q, call.block_kv, tiles.tile
        tokens_kv, D = k.shape[1], q.shape[3]
        entropy, distance = self._diagnoses(diagnosed)
        unused = result.lse
        described = tuple(
            _described(t, rows) if tiles.tma else t
            for t, rows in ((q, block_q), (k, tile), (v, tile))
        )
        with on_device(q):
            attend_blocks[(table.shape[1], heads)](
                *described, result.out, result.lse, self._scratch,
                unused if entropy is None else entropy, unused if distance is None else distance,
                self._positions, table, *self._lists,
                *(t.stride()[:3] for t in (q, k, v)), math.log2(math.e) / math.sqrt(D),
                q.shape[1], tokens_kv, q.shape[2], k.shape[2], call.M, call.N, first,
                len(self._lists[0]), self._width,
                D=D, BLOCK_Q=block_q, BLOCK_KV=block_kv, TILE=tile, DENSE=self._dense,
                RAGGED=tokens_kv % block_kv != 0, SUMS=self._sums_wanted,
                ENTROPY=entropy is not None, DISTANCE=distance is not None, AXES=axes,
                TMA=tiles.tma, STAGES=tiles.stages, HARDWARE=q.is_cuda, num_warps=tiles.warps,
            )  # fmt: skip

    def _diagnoses(self, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
        """Where a launch leaves entropy and distance."""
        return (self.result.entropy, self.result.distance) if wanted else (None, None)

    def _attend_hopper(self, table: Tensor, diagnosed: bool, first: int, heads: int) -> None:
        from wavealign.gpu._hopper_kernels import RowStatistics, attend_rows_hopper

        call, result = self._call, self.result
        (q, k, v), H, M = self._sources, call.q.shape[2], call.M
        group = H // k.shape[2]
        counts, starts, indices = self._lists
        entropy, distance = self._diagnoses(diagnosed)
        head_floats = call.block_q * M * self._width
        at = first
        while at < first + heads:  # one launch a sequence
            b, h = divmod(at, H)
            own = slice(h, h + min(H - h, first + heads - at))
            shared = slice(own.start // group, own.stop // group)
            listed = slice(at % len(counts), at % len(counts) + own.stop - own.start)
            scratch = self._scratch[(at - first) * head_floats :] if self._sums_wanted else None
            attend_rows_hopper(
                q[b : b + 1, :, own], k[b : b + 1, :, shared], v[b : b + 1, :, shared],
                result.out[b : b + 1, :, own], result.lse[b : b + 1, own],
                table[listed], counts[listed], starts[listed.start * M : listed.stop * M],
                indices, None, math.log2(math.e) / math.sqrt(q.shape[3]), call.block_q,
                call.block_kv, RowStatistics(
                    scratch, self._width,
                    None if entropy is None else entropy[b : b + 1, own],
                    None if distance is None else distance[b : b + 1, own],
                    self._every,
                ),
            )  # fmt: skip
            at += own.stop - own.start

    def weigh(self, first: int, heads: int) -> None:
        """Phase 2 of the heads whose phase 1 ran last."""
        call, result = self._call, self.result
        counts, starts, indices = self._lists
        lse = result.lse if self._reference is None else self._reference
        with on_device(lse):
            weigh_blocks[(call.M, heads)](
                self._scratch, lse, result.weights, counts, starts, indices, call.q.shape[1],
                call.N, first, len(counts), self._width,
                BLOCK_Q=call.block_q, PLACES=_PLACES, DENSE=self._dense, num_warps=4,
            )  # fmt: skip


def _parts(table: Tensor, every: int) -> list[tuple[Tensor, bool]]:
    """The query blocks 0, n, 2n, ... of a table and the others, each in the table's order."""
    M = table.shape[1]
    sampled = math.ceil(M / every)
    if sampled == M:
        return [(table, True)]
    left_out = table % every != 0
    order = left_out.to(torch.int8).argsort(dim=1, stable=True)
    ordered = table.gather(1, order)
    return [(ordered[:, :sampled].contiguous(), True), (ordered[:, sampled:].contiguous(), False)]


def _lists(call: Call, listed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Table, counts, starts and indices; ascending where there is no schedule.

    Without candidates only a kernel that needs `listed` blocks uses more of them than the table.
    """
    if call.schedule is not None:
        schedule = call.schedule
        return schedule.table, schedule.counts, schedule.starts, schedule.indices
    N, options = call.N, dict[str, Any](dtype=torch.int32, device=call.q.device)
    rows, columns = (torch.arange(n, **options) for n in (call.M, N))
    if call.candidates is None and not listed:
        return rows[None], rows[None], rows[None], rows[None]
    if call.candidates is None:
        H = call.q.shape[2]
        counts = torch.full((H, call.M), N, **options)
        starts = torch.zeros(H * call.M, dtype=torch.int64, device=call.q.device)
        return rows.repeat(H, 1), counts, starts, columns
    blocks = call.candidates.flatten(0, 1)
    heads, M, _ = blocks.shape
    counts = blocks.sum(-1, dtype=torch.int32)
    places = blocks.cumsum(-1, dtype=torch.int32) - 1
    target = torch.where(blocks, places, N).long()
    indices = torch.zeros(heads, M, N + 1, **options)
    indices.scatter_(-1, target, columns.expand(heads, M, N))
    table = rows.repeat(heads, 1)
    starts = (N + 1) * torch.arange(heads * M, dtype=torch.int64, device=blocks.device)
    return table, counts, starts, indices


def _described(tensor: Tensor, rows: int) -> object:
    """``[B, S, H, D]`` as tiles ``[1, 1, rows, D]`` of ``[B, H, S, D]``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    B, tokens, heads, D = tensor.shape
    strides = [tensor.stride(0), tensor.stride(2), tensor.stride(1), 1]
    return TensorDescriptor(tensor, [B, heads, tokens, D], strides, [1, 1, rows, D])
