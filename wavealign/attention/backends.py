"""Which kernel runs a call, and how it is handed a schedule that lies on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from wavealign.attention.inputs import Geometry, Sequences
from wavealign.errors import InputError, MissingCapabilityError, unknown_name
from wavealign.gpu.backend import Backend
from wavealign.gpu.inputs import Inputs
from wavealign.gpu.row_table import is_hopper
from wavealign.planning.layout import ListLayout
from wavealign.planning.planner import DeviceSchedule

BACKENDS = ("auto", "triton", "fa4", "reference")
_AUTO = ("triton", "fa4")


@dataclass(frozen=True)
class Choice:
    """A backend for a call.

    Attributes:
        name: one of `BACKENDS`, but ``"auto"``.
        reason: why not the ones before it; empty for the first choice, or one that was asked for.
    """

    name: str
    reason: str

    def layout(self, sizes: Geometry) -> ListLayout:
        """How it wants its lists."""
        if self.name == "fa4":
            return ListLayout("gathered", "backwards", sizes.ragged_kv)
        return ListLayout()


def choose_backend(name: str, sizes: Geometry, sequences: Sequences | None, device: str) -> Choice:
    """The backend of this name, or the first that fits.

    Args:
        name: ``"auto"`` (row table where it applies, else FlashAttention-4), or a backend.
        sizes: of the mask.
        sequences: Q, K and V; None while planning ahead, then bf16 heads of 128 are assumed.
        device: ``"cuda"`` or ``"cpu"``.

    Raises:
        InputError: an unknown name, or a problem that the backend would compute wrongly.
        MissingCapabilityError: no GPU, or nothing installed that fits, with every reason.
    """
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    if name == "reference":
        return Choice("reference", "")
    if device != "cuda":
        raise MissingCapabilityError(
            f"backend '{name}' needs q, k and v on an NVIDIA GPU, they are on {device}; "
            "backend='reference' computes the same anywhere, slowly."
        )
    reasons = []
    for candidate in _AUTO if name == "auto" else (name,):
        backend = _backend(candidate)
        if missing := backend.missing():
            reasons.append(f"'{candidate}': {missing}")
            continue
        refusal = backend.capabilities.refusal(
            _problem(sizes, sequences), torch.cuda.get_device_capability()
        )
        if refusal is None:
            return Choice(candidate, "; ".join(reasons))
        reasons.append(f"'{candidate}' {refusal}")
        if name != "auto":
            raise InputError(f"backend {reasons[-1]}.")
    raise MissingCapabilityError(f"no backend for this call: {'; '.join(reasons)}.")


def rows_in_flight(choice: Choice, sizes: Geometry) -> int | None:
    """W of a backend on this GPU; None where there is none (the profile's W then)."""
    if choice.name == "reference":
        return None
    processors = torch.cuda.get_device_properties().multi_processor_count
    return int(processors * _backend(choice.name).rows_per_sm(_problem(sizes, None)))


def run(
    choice: Choice, sizes: Geometry, schedule: DeviceSchedule, sequences: Sequences
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the sequences under a schedule.

    Returns:
        Output ``[B, tokens_q, H, D]`` and log-sum-exp (natural logarithm) float32
        ``[B, H, tokens_q]``.
    """
    one = {"triton": _triton, "fa4": _fa4, "reference": _reference}[choice.name]
    q, k, v = sequences.q, sequences.k, sequences.v
    if choice.name == "fa4" or not is_hopper():
        q, k, v = (t.contiguous() for t in (q, k, v))
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if sizes.batch == 1:
        return one(sizes, schedule, Inputs(q, k, v))
    parts = []
    for b in range(sizes.batch):
        own = slice(b, b + 1)
        heads = slice(b * sizes.H, (b + 1) * sizes.H)
        rows = slice(b * sizes.H * sizes.M, (b + 1) * sizes.H * sizes.M)
        part = DeviceSchedule(
            schedule.table[heads],
            schedule.counts[heads],
            schedule.starts[rows],
            schedule.indices if choice.name == "triton" else schedule.indices[heads],
            schedule.columns,
            schedule.layout,
            schedule.policies[heads],
        )
        parts.append(one(sizes, part, Inputs(q[own], k[own], v[own])))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _backend(name: str) -> Backend:
    if name == "triton":
        from wavealign.gpu.row_table import TritonRows

        return TritonRows()
    from wavealign.gpu.fa4 import FlashAttention4

    return FlashAttention4()


def _problem(sizes: Geometry, sequences: Sequences | None):  # type: ignore[no-untyped-def]
    if sequences is None:
        return sizes.problem(1, sizes.H, 128, "bf16")
    B, _, _, D = sequences.q.shape
    return sizes.problem(B, sequences.k.shape[2], D, sequences.dtype)


def _triton(
    sizes: Geometry, schedule: DeviceSchedule, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    from wavealign.gpu.row_table import TritonRows

    kernel = TritonRows().bind_arrays(
        sizes.problem(inputs.q.shape[0], inputs.k.shape[2], inputs.q.shape[3], "bf16"),
        inputs,
        schedule.table,
        schedule.counts,
        schedule.starts,
        schedule.indices,
    )
    return kernel.launch()


def _fa4(
    sizes: Geometry, schedule: DeviceSchedule, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    from wavealign.gpu.fa4 import FlashAttention4
    from wavealign.gpu.move import gather_blocks, scatter_blocks, scatter_lse

    q, (B, tokens, H, D) = inputs.q, inputs.q.shape
    moved = q.new_zeros(B, sizes.M * sizes.block_q, H, D)
    gather_blocks(q, schedule.table, sizes.block_q, moved)
    kernel = FlashAttention4().bind_arrays(
        (sizes.block_q, sizes.block_kv),
        Inputs(moved, inputs.k, inputs.v),
        schedule.counts,
        schedule.indices,
    )
    launched, launched_lse = kernel.launch()
    out = torch.empty_like(q)
    lse = torch.empty(B, H, tokens, device=q.device)
    scatter_blocks(launched, schedule.table, sizes.block_q, out)
    scatter_lse(launched_lse, schedule.table, sizes.block_q, lse)
    return out, lse


def _reference(
    sizes: Geometry, schedule: DeviceSchedule, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row after row in launch order over its list, in float32: slow, for tests and doubts."""
    from wavealign.gpu.reference import attend_tokens

    q, k, v = inputs.q, inputs.k, inputs.v
    B, tokens, H, D = q.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((B, H, tokens), -math.inf, device=q.device)
    within = torch.arange(sizes.block_kv, device=q.device)
    table, counts = schedule.table.tolist(), schedule.counts.tolist()
    for h in range(H):
        keys, values = (t[:, :, h // (H // k.shape[2])].float() for t in (k, v))
        for row in table[h]:
            if not counts[h][row]:
                continue
            mine = slice(row * sizes.block_q, min((row + 1) * sizes.block_q, tokens))
            blocks = schedule.indices[h, row, : counts[h][row]].long()
            kept = (blocks[:, None] * sizes.block_kv + within).flatten()
            kept = kept[kept < sizes.tokens_kv]
            rows = q[:, mine, h].float()
            attended, lse[:, h, mine] = attend_tokens(rows, keys, values, kept, 1.0 / math.sqrt(D))
            out[:, mine, h] = attended.to(out.dtype)
    return out, lse
