"""`attend_with_importance` on a GPU: lists, scratch memory, rounds of heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wavealign.methods._importance_kernels import attend_blocks, weigh_blocks
from wavealign.methods.importance import SCRATCH_BYTES, Call, Importance

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
    def for_device(cls, call: Call) -> Tiles:
        """What shared memory and registers of the GPU at hand allow."""
        warps = 8 if call.block_q == 128 else 4
        if not call.q.is_cuda:
            return cls(call.block_kv, 1, warps, False)
        capability = torch.cuda.get_device_capability(call.q.device)
        if capability >= (9, 0) and capability[0] != 12:
            return cls(call.block_kv, 2, warps, True)
        # 164 KiB on an A100, 100 KiB on other Ampere, Ada and small Blackwell cards.
        return cls(64 if capability == (8, 0) else 32, 2, warps, False)


class Search:
    """Both phases of a call, bound to buffers: launching neither allocates nor waits.

    Attributes:
        rounds: (first head, heads) of each launch, heads of all sequences counted through.
        result: what the launches write.
    """

    def __init__(
        self,
        call: Call,
        scratch_bytes: int = SCRATCH_BYTES,
        *,
        sums: bool = True,
        entropy: bool | None = None,
        distance: bool | None = None,
        hopper: bool = False,
        tiles: Tiles | None = None,
    ) -> None:
        """Allocate.

        Args:
            call: what Triton takes (`attend_with_importance` checks).
            scratch_bytes: see there.
            sums: write block log-sum-exps; without them phase 1 is plain block-sparse attention.
            entropy, distance: keep these; by default as the call says.
            hopper: phase 1 by the Gluon kernel for Hopper.
            tiles: of the Triton kernel; by default what suits the GPU at hand.
        """
        self._call = call
        q = call.q
        B, tokens, H, _ = q.shape
        self._tiles = tiles or Tiles.for_device(call)
        self._sums_wanted = sums
        self._entropy_wanted = call.diagnostics if entropy is None else entropy
        self._distance_wanted = call.diagnostics if distance is None else distance
        self._dense = call.candidates is None and call.schedule is None
        self._hopper = hopper
        self._lists = _lists(call, listed=hopper)
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
        diagnosed = [
            torch.empty(B, H, tokens, **options) if wanted else None
            for wanted in (self._entropy_wanted, self._distance_wanted)
        ]
        self.result = Importance(
            torch.empty_like(q, memory_format=torch.contiguous_format),
            torch.empty(B, H, tokens, **options),
            torch.zeros(B, H, call.M, call.N, **options) if sums else q.new_zeros(0),
            *diagnosed,
        )
        reference = call.reference_lse
        self._reference = None if reference is None else reference.float().contiguous()
        self._axes, self._positions = 0, self.result.lse
        if call.positions is not None and self._distance_wanted:
            self._positions = call.positions.T.float().contiguous()
            self._axes = len(self._positions)
        tma = hopper or self._tiles.tma
        self._sources = tuple(_strided(t, tma) for t in (q, call.k, call.v))

    def run(self) -> Importance:
        """Both phases, round after round."""
        for first, heads in self.rounds:
            self.attend(first, heads)
            if self._sums_wanted:
                self.weigh(first, heads)
        return self.result

    def attend(self, first: int, heads: int) -> None:
        """Phase 1 of some heads."""
        if self._hopper:
            self._attend_hopper(first, heads)
            return
        call, result, tiles = self._call, self.result, self._tiles
        q, k, v = self._sources
        block_q, block_kv, tile = call.block_q, call.block_kv, tiles.tile
        tokens_kv, D = k.shape[1], q.shape[3]
        unused = result.lse
        described = tuple(
            _described(t, rows) if tiles.tma else t
            for t, rows in ((q, block_q), (k, tile), (v, tile))
        )
        attend_blocks[(call.M, heads)](
            *described, result.out, result.lse, self._scratch,
            unused if result.entropy is None else result.entropy,
            unused if result.distance is None else result.distance,
            self._positions, *self._lists,
            *(t.stride()[:3] for t in (q, k, v)), math.log2(math.e) / math.sqrt(D),
            q.shape[1], tokens_kv, q.shape[2], k.shape[2], call.N, first, len(self._lists[1]),
            self._width,
            D=D, BLOCK_Q=block_q, BLOCK_KV=block_kv, TILE=tile, DENSE=self._dense,
            RAGGED=tokens_kv % block_kv != 0, SUMS=self._sums_wanted,
            ENTROPY=self._entropy_wanted, DISTANCE=self._distance_wanted, AXES=self._axes,
            TMA=tiles.tma, STAGES=tiles.stages, HARDWARE=q.is_cuda, num_warps=tiles.warps,
        )  # fmt: skip

    def _attend_hopper(self, first: int, heads: int) -> None:
        from wavealign.gpu._hopper_kernels import RowStatistics, attend_rows_hopper

        call, result = self._call, self.result
        (q, k, v), H, M = self._sources, call.q.shape[2], call.M
        group = H // k.shape[2]
        table, counts, starts, indices = self._lists
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
                table[listed], counts[listed], starts[listed.start * M : listed.stop * M], indices,
                None, math.log2(math.e) / math.sqrt(q.shape[3]), call.block_q, call.block_kv,
                RowStatistics(
                    scratch, self._width,
                    None if result.entropy is None else result.entropy[b : b + 1, own],
                    None if result.distance is None else result.distance[b : b + 1, own],
                ),
            )  # fmt: skip
            at += own.stop - own.start

    def weigh(self, first: int, heads: int) -> None:
        """Phase 2 of the heads whose phase 1 ran last."""
        call, result = self._call, self.result
        _, counts, starts, indices = self._lists
        lse = result.lse if self._reference is None else self._reference
        weigh_blocks[(call.M, heads)](
            self._scratch, lse, result.weights, counts, starts, indices, call.q.shape[1], call.N,
            first, len(counts), self._width,
            BLOCK_Q=call.block_q, PLACES=_PLACES, DENSE=self._dense, num_warps=4,
        )  # fmt: skip


def attend_on_gpu(call: Call, scratch_bytes: int, hopper: bool) -> Importance:
    """See `wavealign.methods.importance.attend_with_importance`. Nothing waits for the device."""
    return Search(call, scratch_bytes, hopper=hopper).run()


def _lists(call: Call, listed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Table, counts, starts and indices; ascending where there is no schedule.

    Without candidates they are of use to a kernel that needs `listed` blocks only.
    """
    if call.schedule is not None:
        schedule = call.schedule
        return schedule.table, schedule.counts, schedule.starts, schedule.indices
    N, device = call.N, call.q.device
    if call.candidates is None and listed:
        H = call.q.shape[2]
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return (
            torch.arange(call.M, **options).repeat(H, 1),
            torch.full((H, call.M), N, **options),
            torch.zeros(H * call.M, dtype=torch.int64, device=device),
            torch.arange(N, **options),
        )
    if call.candidates is None:
        unused = torch.empty(1, dtype=torch.int32, device=device)
        return unused, unused, unused, unused
    blocks = call.candidates.flatten(0, 1)
    heads, M, _ = blocks.shape
    counts = blocks.sum(-1, dtype=torch.int32)
    places = blocks.cumsum(-1, dtype=torch.int32) - 1
    target = torch.where(blocks, places, N).long()
    indices = torch.zeros(heads, M, N + 1, dtype=torch.int32, device=device)
    columns = torch.arange(N, dtype=torch.int32, device=device)
    indices.scatter_(-1, target, columns.expand(heads, M, N))
    table = torch.arange(M, dtype=torch.int32, device=device).repeat(heads, 1)
    starts = (N + 1) * torch.arange(heads * M, dtype=torch.int64, device=device)
    return table, counts, starts, indices


def _strided(tensor: Tensor, tma: bool) -> Tensor:
    """The tensor, or a copy where the kernel can't read it in place."""
    fits = tensor.stride(-1) == 1
    if tma:  # 16-byte strides and addresses
        fits = fits and tensor.data_ptr() % 16 == 0
        fits = fits and all(s * tensor.element_size() % 16 == 0 for s in tensor.stride()[:3])
    return tensor if fits else tensor.contiguous()


def _described(tensor: Tensor, rows: int) -> object:
    """``[B, S, H, D]`` as tiles ``[1, 1, rows, D]`` of ``[B, H, S, D]``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    B, tokens, heads, D = tensor.shape
    strides = [tensor.stride(0), tensor.stride(2), tensor.stride(1), 1]
    return TensorDescriptor(tensor, [B, heads, tokens, D], strides, [1, 1, rows, D])
