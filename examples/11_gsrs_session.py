"""Run a GSRS session: search for the blocks that matter at a few steps, reuse them in between.

You will learn how a session stands behind the attention of a denoising run. It attends in full up
to the first search, weighs blocks at a search, keeps those that hold a share p of the attention,
and plans one schedule for all steps until the next search (`docs/gsrs.md`). Q and K are made up:
content comes up out of noise that falls from step to step.

    pip install '.[gpu,methods]'
    python examples/11_gsrs_session.py

It prints what each step did, the density of the mask in use, and the session's account.
"""

import math

import torch

from wavealign.sessions import GsrsSession

torch.manual_seed(0)
STEPS, GRID, H, D = 8, (4, 8, 16), 2, 32
places = torch.cartesian_prod(*(torch.linspace(0, 1, n) for n in GRID))
phases = places @ torch.randn(3, H * D // 2) * 6.0
content = torch.cat([phases.cos(), phases.sin()], 1).view(1, -1, H, D)  # [B, tokens, H, D]
noise, v = torch.randn(2, *content.shape)

session = GsrsSession(
    search_steps=(2, 4, 6), p=(0.95, 0.9, 0.8), block=(32, 32), steps=STEPS, grid=GRID,
    policy="lockstep", profile="h200", backend="reference",
)  # fmt: skip
for step in range(STEPS):
    level = 0.9 * (1 - step / (STEPS - 1)) ** 2
    x = math.sqrt(1 - level) * content + math.sqrt(level) * noise
    out = session.attend(step, 0, x * 2.0, x, v)  # step, layer, q, k, v
    action = session.rule.action(step)
    density = f"{float(session.mask(0).float().mean()):.2f}" if step >= 2 else "1.00"
    print(f"step {step}: {action:6} density {density}, output of norm {float(out.norm()):.1f}")

told = session.statistics
print(f"{told.full} steps in full, {told.searched} searches, {told.reused} steps reused a mask")
print(session.explain())
