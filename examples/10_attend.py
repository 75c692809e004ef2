"""Run block-sparse attention: `attend`, `plan`, and `Attention` over the steps of a loop.

You will learn the three ways to call WaveAlign from a pipeline. `attend` is one call, `plan` does
the planning once for many calls, and `Attention` stands behind one layer and plans at every call,
unless it is told that the mask is still the same. On a GPU leave `backend` and the device's name
out; the backend `reference` computes the same on a CPU, slowly.

    pip install '.[gpu]'
    python examples/10_attend.py

It prints how far the outputs are from each other, the plan, and what `Attention` has done.
"""

import torch

import wavealign as wa

torch.manual_seed(0)
H, tokens, D = 2, 1536, 64
q, k, v = torch.randn(3, 1, H, tokens, D)  # [B, H, tokens, D]
mask = torch.rand(H, 12, 12) < 0.4  # blocks of 128 x 128 tokens
mask |= torch.eye(12, dtype=torch.bool)
cpu = {"backend": "reference"}

natural = wa.attend(q, k, v, mask, policy="original", device_profile="h200", **cpu)
plan = wa.plan(mask, "resync", "h200", **cpu)
reordered = wa.attend(q, k, v, plan=plan)
kept = mask.repeat_interleave(128, 1).repeat_interleave(128, 2)
torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
print(f"resync against original: {float((reordered - natural).abs().max()):.1e} at most")
print(f"resync against torch:    {float((reordered - torchs).abs().max()):.1e} at most")
print(plan.explain())

site = wa.Attention("h200", **cpu)  # one an attention layer, kept over the steps
for step in range(6):
    if step == 3:
        mask = mask.roll(1, 2)  # a new mask: lists are made anew
    site(q, k, v, mask, same_mask=step not in (0, 3))  # nothing has written to it
print(site.explain())
print(site.statistics)
