"""The section `wan` of benchmarks/production.py: steps of a model of Wan2.1-14B's widths."""

from __future__ import annotations

from typing import Any

import torch
from common import DATA
from production_bench import Bench

import wavealign
from wavealign.attention.backends import choose_backend, rows_in_flight
from wavealign.attention.inputs import Sequences, mask_sizes
from wavealign.masks import load_mask


def wan(bench: Bench) -> dict[str, Any]:
    """Steps of a model of Wan2.1-14B's widths, and their attention, at two lengths."""
    if bench.small:
        return {"lengths": [wan_length(bench, "xattention_75600", (1, 16, 16), 2, 2)]}
    return {
        "lengths": [
            wan_length(bench, "xattention_75600", (21, 90, 160), 40, 2),
            wan_length(bench, "xattention_363600", (101, 90, 160), 40, 1),
        ]
    }


def wan_length(
    bench: Bench, source: str, size: tuple[int, int, int], heads: int, layers: int
) -> dict[str, Any]:
    """One length. Weights are random, so attention runs on the masks of the clip."""
    tokens = size[0] * size[1] * size[2] // 4
    M = -(-tokens // 128)
    shipped = bench.dense(load_mask(DATA / f"{source}.npz").mask)[:, :M, :M]
    kept = torch.cat([shipped.roll(i, 1) for i in range(-(-heads // len(shipped)))])
    kept = kept[:heads].contiguous()
    found = {"tokens": tokens, "heads": heads, "layers": layers}
    found["density"] = float(kept.float().mean())
    found |= wan_steps(bench, kept, size, layers)
    found["attention"] = wan_attention(bench, kept, tokens)
    return found


def wan_steps(
    bench: Bench, kept: torch.Tensor, size: tuple[int, int, int], layers: int
) -> dict[str, Any]:
    """Steps: dense, sparse, sparse in another order; with masks given, and found in every step.

    What finding a mask costs is that of XAttention on the model's own Q and K, head by head as
    `enable` does it; its result isn't used.
    """
    from wavealign.integrations import diffusers as integration

    dtype = torch.bfloat16 if bench.cuda else torch.float32
    model = wan_model(bench.device, dtype, len(kept), layers, 256 if bench.small else 13824)
    inputs = wan_inputs(bench.device, dtype, size)
    estimate = integration.named_method("xattention")

    @torch.no_grad()
    def step() -> object:
        return model(**inputs, return_dict=False)

    def given(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return kept.clone()

    def found(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        estimate(q, k)
        return kept.clone()

    times = {"dense": bench.ms(step, 2)}
    result: dict[str, Any] = {"step_ms": times}
    for name, method, policy in (
        ("sparse", given, "original"),
        ("sparse + WaveAlign", given, "auto"),
        ("sparse, masks found", found, "original"),
        ("sparse + WaveAlign, masks found", found, "auto"),
    ):
        integration.enable(
            model, method, policy=policy, profile=bench.profile, backend=bench.backend
        )
        times[name] = bench.ms(step, 2)
        if policy == "auto":
            result["statistics"] = vars(integration.statistics(model))
            result["explain"] = integration.explain(model).splitlines()[: len(kept)]
        integration.disable(model)
    return result


def wan_model(
    device: str, dtype: torch.dtype, heads: int, layers: int, ffn_dim: int
) -> torch.nn.Module:
    """A Wan2.1 transformer of random weights, heads of 128."""
    from diffusers import WanTransformer3DModel

    with torch.device(device):
        model = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=128,
            in_channels=16, out_channels=16, text_dim=64, freq_dim=256, ffn_dim=ffn_dim,
            num_layers=layers,
        )  # fmt: skip
    made: torch.nn.Module = model.to(dtype).eval()
    return made


def wan_inputs(device: str, dtype: torch.dtype, size: tuple[int, int, int]) -> dict[str, Any]:
    """Arguments of a call: random latents (frames, height, width) and text."""
    with torch.device(device):
        return {
            "hidden_states": torch.randn(1, 16, *size, dtype=dtype),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": torch.randn(1, 512, 64, dtype=dtype),
        }


def wan_attention(bench: Bench, kept: torch.Tensor, tokens: int) -> dict[str, Any]:
    """One attention of the model: the kernel alone, with its planning, and finding its mask."""
    from wavealign.integrations.diffusers import named_method

    heads = len(kept)
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    q, k, v = (
        torch.randn(1, tokens, heads, 128, device=bench.device, dtype=dtype) for _ in range(3)
    )
    sizes = mask_sizes(kept.shape, 1, (128, 128), (tokens, tokens))
    sizes = Sequences.check(q, k, v, "bshd").fitted(sizes)
    backend = choose_backend(bench.backend, sizes, bench.device)
    found: dict[str, Any] = {"backend": backend.name, "wave": rows_in_flight(backend, sizes)}
    terms = {"backend": bench.backend, "layout": "bshd"}
    for policy in ("original", "auto"):
        site = wavealign.Attention(bench.profile, policy=policy, **terms)
        found[f"{policy}_ms"] = bench.ms(lambda s=site: s(q, k, v, kept.clone()), 3)
        plan = wavealign.plan(
            kept, policy, bench.profile, tokens=(tokens, tokens), backend=bench.backend
        )
        found[f"{policy}_kernel_ms"] = bench.ms(lambda p=plan: bench.attend((q, k, v), p), 3)
    estimate = named_method("xattention")
    found["find_mask_ms"] = bench.ms(lambda: estimate(q, k), 1)
    return found
