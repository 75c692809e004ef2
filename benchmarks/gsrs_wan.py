"""The section `diffusers` of benchmarks/gsrs_sessions.py: a run under a Wan transformer.

Wan2.1-1.3B's widths (12 heads of 128, feed-forward 8,960), two layers, random weights. Random
weights attend to all tokens alike, so the queries' norms are scaled until masks are sparse, and
the latents are smooth; noise falls over the steps as in `wavealign.qk.trajectory`. Time is
that of a whole step of the model. What masks such a model has says nothing of a trained one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from gsrs_bench import Bench
from production_wan import wan_inputs, wan_model

from wavealign.qk.trajectory import START

_SHARPER = 6.0
P = (0.95, 0.9)


def diffusers(bench: Bench) -> None:
    """A run at each length: dense, gsrs by the guard, gsrs in natural order."""
    if bench.small:
        lengths: tuple[tuple[tuple[int, int, int], bool], ...] = (((2, 16, 24), True),)
    else:
        # 81 frames of 480p with both branches of the guidance, and of 720p with one.
        lengths = (((21, 60, 104), True), ((21, 90, 160), False))
    layers, heads = (1, 2) if bench.small else (2, 12)
    dtype = bench.dtype
    torch.manual_seed(0)
    model = wan_model(bench.device, dtype, heads, layers, 64 if bench.small else 8960)
    for block in model.blocks:
        block.attn1.norm_q.weight.mul_(_SHARPER)
    whole_is_dense(bench, model, wan_inputs(bench.device, dtype, lengths[0][0]))
    for size, guided in lengths:
        a_run(bench, model, Latents(bench, size, dtype), guided)


class Latents:
    """Inputs of a call at a step: content that comes up out of noise."""

    def __init__(self, bench: Bench, size: tuple[int, int, int], dtype: torch.dtype) -> None:
        self._arguments = wan_inputs(bench.device, dtype, size)
        self.tokens = size[0] * size[1] * size[2] // 4
        self._steps = bench.steps
        few = torch.randn(1, 16, 3, 6, 6, device=bench.device)
        content = torch.nn.functional.interpolate(few, size=size, mode="trilinear")
        self._content = (content / content.std()).to(dtype)
        self._noise = self._arguments["hidden_states"]

    def at(self, step: int) -> dict[str, Any]:
        """Arguments of the model."""
        level = START * (1 - step / (self._steps - 1)) ** 2
        mixed = math.sqrt(1 - level) * self._content + math.sqrt(level) * self._noise
        timestep = torch.tensor([1000 - 1000 * step // self._steps], device=mixed.device)
        return {**self._arguments, "hidden_states": mixed, "timestep": timestep}


def whole_is_dense(bench: Bench, model: Any, inputs: dict[str, Any]) -> None:
    """With p = 1 a search and a reused mask give the dense model's output."""
    from wavealign.integrations.diffusers import disable
    from wavealign.integrations.diffusers_sessions import enable_session, session_of

    dense = model(**inputs, return_dict=False)[0].float()
    options = {**bench.terms, "steps": 2, "search_steps": (0,), "p": (1.0,)}
    enable_session(model, "gsrs", policy="lockstep", **options)
    for step, timestep in enumerate((500, 499)):
        inputs["timestep"].fill_(timestep)
        if step:
            disable(model)
            dense = model(**inputs, return_dict=False)[0].float()
            enable_session(model, "gsrs", policy="lockstep", **options)
            inputs["timestep"].fill_(timestep + 1)
            model(**inputs, return_dict=False)
            inputs["timestep"].fill_(timestep)
        out = model(**inputs, return_dict=False)[0].float()
        error = float((out - dense).norm() / dense.norm())
        bench.note("diffusers", check="p = 1", call=("search", "reuse")[step], error_frac=error,
                   density=session_of(model).statistics.density(0))  # fmt: skip
        bench.say(f"p = 1, {('search', 'reuse')[step]}: {error:.1e} off the dense model")
        assert error < 0.03, f"p = 1 gives {error:.1e} of the dense output's norm away from it"
    disable(model)


def warm_up(bench: Bench, model: Any, latents: Latents) -> None:
    """Compile what a run of this length needs: full attention, both kinds of search, plans."""
    from wavealign.integrations.diffusers import disable
    from wavealign.integrations.diffusers_sessions import enable_session

    for policy in ("auto", "lockstep", "original"):
        options = {**bench.terms, "steps": 4, "search_steps": (1, 2), "p": P}
        enable_session(model, "gsrs", policy=policy, **options)
        for step in range(4):
            model(**latents.at(bench.steps // 2 + step), return_dict=False)
        disable(model)


def a_run(bench: Bench, model: Any, latents: Latents, guided: bool) -> None:
    """Times of a whole run, ms."""
    from wavealign.integrations.diffusers import disable
    from wavealign.integrations.diffusers_sessions import enable_session, session_of

    branches = 2 if guided else 1
    warm_up(bench, model, latents)
    for label, policy in (("dense", None), ("gsrs, auto", "auto"), ("gsrs, original", "original")):
        steps = list(range(bench.steps)) if policy else [0, 0, bench.steps - 1]
        if policy:
            options = {**bench.terms}
            if bench.small:
                options |= {"search_steps": (1, 3, 5, 6)}
            enable_session(model, "gsrs", policy=policy, **options)
        times: list[float] = []
        finite = True
        for step in steps:
            inputs = latents.at(step)
            ms = 0.0
            for _ in range(branches):
                (out,), once, _ = bench.timed(partial(model, **inputs, return_dict=False))
                ms += once
                finite = finite and bool(torch.isfinite(out).all())
            times.append(ms)
        found: dict[str, Any] = {"step_ms": times, "finite": finite, "branches": branches}
        if policy:
            session = session_of(model)
            told = session.statistics
            found |= {
                "calls": [told.full, told.searched, told.reused], "plans": told.plans,
                "own_ms": {kind: 1e3 * s for kind, s in told.seconds.items()},
                "found": [vars(record) for record in told.searches],
                "explain": session.explain().splitlines()[:12],
            }  # fmt: skip
            disable(model)
        mean = sum(times) / len(times) if policy else times[-1]
        bench.note("diffusers", run=label, tokens=latents.tokens, mean_step_ms=mean,
                   **found, **bench.memory())  # fmt: skip
        bench.say(f"{latents.tokens} tokens, {label}: {mean:.1f} ms a step, finite: {finite}")
