"""GSRS, AdaSpa or LiteAttention under a diffusers video transformer: `enable_session`.

A session counts denoising steps; a transformer is only called. `Progress` tells runs, steps and
branches of the guidance from the calls, and refuses what can't be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from wavealign.errors import InputError
from wavealign.integrations.diffusers import put_sites, sites_of
from wavealign.integrations.diffusers import restart as restart
from wavealign.integrations.dispatch import Site
from wavealign.integrations.models import token_grid
from wavealign.integrations.padding import Lengths, Padding
from wavealign.integrations.progress import Progress
from wavealign.qk.grid import TokenGrid
from wavealign.sessions import Session, make_session

BRANCHES = ("cond", "uncond")
_CACHES = ("cache", "broadcast", "fbc_")  # parts of the names of diffusers' hooks


@dataclass
class _Run:
    """A transformer's session, and where in the run it is."""

    name: str
    options: dict[str, Any]
    progress: Progress
    session: Session | None = None
    grid: TokenGrid | None = None
    tokens: str = ""

    @property
    def branch(self) -> str:
        number = self.progress.place.branch if self.progress.place is not None else 0
        return BRANCHES[number] if number < len(BRANCHES) else f"call {number}"

    def begin_call(self, model: Any, given: dict[str, Any]) -> None:
        """Before the transformer runs: a run may begin."""
        place, grid = self.progress.place, token_grid(model, given)
        assert place is not None
        if place.step == place.call == 0:
            refuse_cache(model)
            self._begin_run(grid)
            self.tokens = place.tokens
        elif place.tokens != self.tokens:
            raise InputError(
                f"step {place.step} has tokens of {grid or 'other places'} and the run began with "
                f"{self.grid or 'others'}; its masks are over those. Expected one size a run, or a "
                "new one: restart(transformer)."
            )
        elif self.progress.interrupted:
            raise InputError(
                f"a call of the transformer at or before this one, at timestep "
                f"{self.progress.timestep:g}, was broken off, and some layers are a step ahead of "
                "others; expected a new run: restart(transformer)."
            )

    def _begin_run(self, grid: TokenGrid | None) -> None:
        if self.session is None or grid != self.grid:
            session = make_session(self.name, grid=grid, **self.options)
            self.session, self.grid = session, grid
        self.session.reset()


@dataclass
class _SessionSite(Site):
    """A session's, with its transformer's run."""

    run: _Run

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths
    ) -> torch.Tensor:
        run, place = self.run, self.progress.placed()
        session = run.session
        assert session is not None
        alone = len(lengths.parts()) == 1

        def one(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            branch = run.branch if alone else f"{run.branch}, sequence {i}"
            text = q.shape[1] - lengths.video_tokens
            return session.attend(place.step, self.layer, q, k, v, branch, text)

        return lengths.attend(q, k, v, one)


def enable_session(
    transformer: torch.nn.Module, method: str = "gsrs", *, steps: int = 50, min_tokens: int = 0,
    **options: Any,
) -> None:  # fmt: skip
    """Put a session under every self-attention of a transformer.

    `wavealign.integrations.diffusers.disable` takes it away. Reading timestep and text makes the
    host wait once a call of the transformer.

    Args:
        transformer: a Wan, LTX or HunyuanVideo transformer of diffusers (``pipe.transformer``).
        method: one of `wavealign.sessions.SESSIONS`.
        steps: denoising steps of a run (``num_inference_steps``); a method's search steps are
            among them. Where two transformers share a run (Wan2.2), the steps of this one, which
            count from its own first.
        min_tokens: shorter sequences go to the model's own attention.
        options: of the session (search_steps, p, block, profile, policy, backend, ...), but its
            grid, which is the model's.

    Raises:
        InputError: another model, one that is enabled already or has a cache that skips layers,
            unknown names, or what the session refuses.
    """
    name = type(transformer).__name__
    if "Framepack" in name:
        raise InputError(
            f"{name} has frames of the past in the sequence, so its tokens are no grid; expected "
            "a Wan, LTX or HunyuanVideo transformer."
        )
    for given in ("grid", "text_tokens"):
        if given in options:
            raise InputError(f"{given}={options[given]}: the model says it; leave it out.")
    refuse_cache(transformer)
    options = {**options, "steps": steps}
    # What can be wrong with them shows now, not in the middle of a run.
    make_session(method, grid=TokenGrid(1, 1, 1), **options)
    run, padding = _Run(method, options, Progress(steps)), Padding()
    put_sites(
        transformer, lambda i, own: _SessionSite(own, min_tokens, padding, run.progress, i, run),
        lambda: run.progress.watch(transformer, run.begin_call),
    )  # fmt: skip


def refuse_cache(transformer: torch.nn.Module) -> None:
    """Raise where diffusers caches what layers give: a session needs every layer at every step.

    Raises:
        InputError: there is such a cache.
    """
    for module in transformer.modules():
        hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
        for name in hooks:
            if any(part in name for part in _CACHES):
                raise InputError(
                    f"this {type(transformer).__name__} has a cache that skips layers ({name}), "
                    "and a session needs every layer at every step; expected none: "
                    "transformer.disable_cache()."
                )


def session_of(transformer: torch.nn.Module) -> Session:
    """The session of an enabled transformer, for its statistics.

    Raises:
        InputError: it has none, or none yet.
    """
    run = _run_of(transformer)
    if run.session is None:
        raise InputError("the transformer wasn't called yet; its session begins with that.")
    return run.session


def _run_of(transformer: torch.nn.Module) -> _Run:
    for site in sites_of(transformer, _SessionSite):
        return site.run
    raise InputError(
        f"this {type(transformer).__name__} runs no session; expected enable_session first."
    )
