"""GSRS, AdaSpa or LiteAttention under a diffusers video transformer: `enable_session`.

A session counts denoising steps; a transformer is only called. Steps are told apart by the
timestep that it is called with: a lower value is the next step, the same value again the next
branch of the guidance (conditional, then unconditional, as diffusers calls them), and a higher
value than before another run, which begins anew (`restart` says so where one was broken off).
Schedulers that evaluate a timestep twice can't be told from guidance, and are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from wavealign.errors import InputError
from wavealign.integrations.capture import latent_grid, timestep_of
from wavealign.integrations.diffusers import put_sites, sites_of
from wavealign.integrations.dispatch import Site
from wavealign.integrations.padding import Lengths, Padding
from wavealign.qk.grid import TokenGrid
from wavealign.sessions import Session, make_session

BRANCHES = ("cond", "uncond")


@dataclass
class _Run:
    """A transformer's session, and where in the run it is."""

    name: str
    options: dict[str, Any]
    session: Session | None = None
    grid: TokenGrid | None = None
    timestep: float | None = None
    step: int = 0
    call: int = 0
    calls: int = 0  # at the first step: one for each branch
    running: bool = False  # a call that began and didn't end
    hooks: list[Any] = field(default_factory=list, repr=False)

    @property
    def branch(self) -> str:
        return BRANCHES[self.call] if self.call < len(BRANCHES) else f"call {self.call}"

    @torch.compiler.disable
    def begin_call(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before the transformer runs: which step and branch this is."""
        value = timestep_of(named.get("timestep", arguments[1] if len(arguments) > 1 else None))
        if value is None:
            raise InputError("the transformer was called without a timestep; a session counts it.")
        step, call = self._place(value)
        grid = _grid_of(model, arguments, named)
        if (step, call) == (0, 0):
            self._begin_run(grid)
        elif grid != self.grid:
            raise InputError(
                f"step {step} has tokens of {grid} and the run began with {self.grid}; its masks "
                "are over those. Expected one size a run, or a new one: restart(transformer)."
            )
        self.step, self.call, self.timestep = step, call, value
        self.calls = call + 1 if step == 0 else self.calls
        self.running = True

    def end_call(self, *_: Any) -> None:
        """After the transformer ran."""
        self.running = False

    def _place(self, value: float) -> tuple[int, int]:
        """Step, and call within the step, of a timestep."""
        before = self.timestep
        if before is None or value > before:
            return 0, 0
        if self.running:
            if value == before and (self.step, self.call) == (0, 0):
                return 0, 0
            raise InputError(
                f"the call of the transformer before this one, at timestep {before:g}, was broken "
                "off, and some layers are a step ahead of others; expected a new run: "
                "restart(transformer)."
            )
        if value < before:
            if self.step + 1 >= self.options["steps"]:
                raise InputError(
                    f"timestep {value:g} is step {self.step + 1} of a run of "
                    f"{self.options['steps']} steps (from 0); expected as many as "
                    "enable_session(steps=...) says, or a new run: restart(transformer)."
                )
            return self.step + 1, 0
        if self.step and self.call + 1 >= self.calls:
            raise InputError(
                f"call {self.call + 2} of the transformer at timestep {value:g}, step {self.step}; "
                f"there were {self.calls} at the first step. Expected a scheduler that evaluates "
                "each timestep once, and guidance from the first step on; after a step that was "
                "broken off, restart(transformer)."
            )
        return self.step, self.call + 1

    def _begin_run(self, grid: TokenGrid | None) -> None:
        if self.session is None or grid != self.grid:
            self.grid = grid
            self.session = make_session(self.name, grid=grid, **self.options)
        self.session.reset()


def _grid_of(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> TokenGrid | None:
    """The token grid that a transformer is called with."""
    sizes = [named.get(name) for name in ("num_frames", "height", "width")]
    if all(isinstance(size, int) for size in sizes):
        return TokenGrid(*sizes)  # type: ignore[arg-type]
    return latent_grid(model, named.get("hidden_states", arguments[0] if arguments else None))


@dataclass
class _SessionSite(Site):
    """A session's: the layer's number, and its transformer's run."""

    run: _Run
    layer: int

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths
    ) -> torch.Tensor:
        run, session = self.run, self.run.session
        if session is None:
            raise InputError("an attention layer was called outside its transformer.")
        alone = len(lengths.parts()) == 1

        def one(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            branch = run.branch if alone else f"{run.branch}, sequence {i}"
            text = q.shape[1] - lengths.video_tokens
            return session.attend(run.step, self.layer, q, k, v, branch, text)

        return lengths.attend(q, k, v, one)

    def close(self) -> None:
        """Stop counting steps; the first layer's call does it, the others' do nothing."""
        for hook in self.run.hooks:
            hook.remove()


def enable_session(
    transformer: torch.nn.Module,
    method: str = "gsrs",
    *,
    steps: int = 50,
    min_tokens: int = 0,
    **options: Any,
) -> None:
    """Put a session under every self-attention of a transformer.

    `wavealign.integrations.diffusers.disable` takes it away. Reading the timestep makes the host
    wait once a call of the transformer.

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
        InputError: another model, one that is enabled already, unknown names, or what the session
            refuses.
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
    options = {**options, "steps": steps}
    # What can be wrong with them shows now, not in the middle of a run.
    make_session(method, grid=TokenGrid(1, 1, 1), **options)
    run, padding = _Run(method, options), Padding()
    put_sites(transformer, lambda i, own: _SessionSite(own, min_tokens, padding, run, i))
    run.hooks = [
        transformer.register_forward_pre_hook(run.begin_call, with_kwargs=True),
        transformer.register_forward_hook(run.end_call),
    ]


def session_of(transformer: torch.nn.Module) -> Session:
    """The session of an enabled transformer, for its statistics.

    Raises:
        InputError: it has none, or none yet.
    """
    run = _run_of(transformer)
    if run.session is None:
        raise InputError("the transformer wasn't called yet; its session begins with that.")
    return run.session


def restart(transformer: torch.nn.Module) -> None:
    """Take the next call as the first of a run, for after one that was broken off.

    Raises:
        InputError: it runs no session.
    """
    _run_of(transformer).timestep = None


def _run_of(transformer: torch.nn.Module) -> _Run:
    for site in sites_of(transformer, _SessionSite):
        return site.run
    raise InputError(
        f"this {type(transformer).__name__} runs no session; expected enable_session first."
    )
