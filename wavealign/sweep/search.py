"""Search strategies: what to try next. Draws are optuna's; the store is the truth.

A strategy is asked for specs and told how they ended. It may be asked again for what the store
already knows: the answer is told without running. A drawn point depends on the seed, its number
and the trials told before, on nothing else, so a serial search that was interrupted continues as
if it hadn't been.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from wavealign._extras import require
from wavealign.errors import InputError
from wavealign.runs.launch import OBJECTIVES, Launch
from wavealign.runs.trial import TrialRecord
from wavealign.sweep.space import Range, Space, Value, fill

if TYPE_CHECKING:
    import optuna.trial

    from wavealign.sweep.store import Draws

_MOST_TRIALS = 1_000_000  # of a grid, which holds them all


class GridSearch:
    """Every combination once, baselines first.

    Args:
        space: without ranges.
        baselines: a condition each.
        note: told of combinations that are the same.

    Raises:
        InputError: the space has a range.
    """

    def __init__(
        self, space: Space, baselines: Sequence[Launch], note: Callable[[str], None]
    ) -> None:
        if ranges := space.ranges():
            raise InputError(
                f"parameter '{ranges[0]}' is a range, which a grid can't go through; list its "
                "values, or --search random or tpe."
            )
        if (asked_for := space.combinations * len(baselines)) > _MOST_TRIALS:
            raise InputError(
                f"a grid of {asked_for:,} trials is more than anybody waits for (at most "
                f"{_MOST_TRIALS:,}); list fewer values, or --search random or tpe."
            )
        specs = {base.named: base for base in baselines}
        repeated = 0
        for base in baselines:
            asked: set[str] = set()  # `original` in the list is the baseline, no duplicate
            for policy in space.grid(base.wave, base.seed):
                spec = dataclasses.replace(base, policy=policy)
                repeated += spec.named in asked
                asked.add(spec.named)
                specs.setdefault(spec.named, spec)
        if repeated:
            note(f"{repeated} combinations are the same as others; each runs once.")
        self.total, self.learns = len(specs), False
        self._left = iter(specs.values())

    def ask(self) -> Launch | None:
        """The next combination; None when there are no more."""
        return next(self._left, None)

    def tell(self, record: TrialRecord) -> None:
        """A grid learns nothing."""


class DrawnSearch:
    """Policies drawn by optuna, the conditions in turn, each with a study of its own.

    Args:
        space: what to draw from.
        baselines: a condition each; they run first, and don't count.
        kind: ``"random"`` or ``"tpe"``.
        trials: to draw, over all conditions.
        seed: of the draws.
        objective: of `OBJECTIVES`.
        log: keeps what was drawn: draw number → values. Filled by an earlier run, its draws come
            first, as they were.

    Raises:
        InputError: fewer trials than conditions.
        MissingCapabilityError: optuna isn't installed.
    """

    def __init__(
        self,
        space: Space, baselines: Sequence[Launch], kind: str, trials: int, seed: int,
        objective: str, log: Draws,
    ) -> None:  # fmt: skip
        library = require("optuna", "sweep", f"--search {kind}")
        library.logging.set_verbosity(library.logging.WARNING)
        if trials < len(baselines):
            raise InputError(
                f"--trials {trials} is fewer than the {len(baselines)} conditions (mask, heads, "
                "device, ...) that each want a draw; ask for more, or for fewer conditions."
            )
        self._space, self._baselines = space, baselines
        self._trials, self._seed, self._log = trials, seed, log
        self._field = OBJECTIVES[objective]
        samplers = {"random": library.samplers.RandomSampler, "tpe": library.samplers.TPESampler}
        self._sampler = samplers[kind]
        self._state = library.trial.TrialState
        self._studies = [library.create_study(direction="minimize") for _ in baselines]
        self._waiting: dict[str, list[tuple[int, optuna.trial.Trial]]] = {}
        self._specs = self._asked()
        self.total, self.learns = len(baselines) + trials, kind == "tpe"

    def ask(self) -> Launch | None:
        """The next draw. The same policy may be drawn again."""
        return next(self._specs, None)

    def tell(self, record: TrialRecord) -> None:
        """Every draw of this trial learns how it ended."""
        for condition, trial in self._waiting.pop(record.spec.named, []):
            value = getattr(record.result, self._field) if record.result is not None else None
            state = self._state.FAIL if value is None else None
            self._studies[condition].tell(trial, value, state=state)

    def _asked(self) -> Iterator[Launch]:
        yield from self._baselines
        for number in range(self._trials):
            condition = number % len(self._baselines)
            base, study = self._baselines[condition], self._studies[condition]
            state = np.random.SeedSequence([self._seed, number]).generate_state(1)
            study.sampler = self._sampler(seed=int(state[0]))
            if number in self._log.draws:
                study.enqueue_trial(self._log.draws[number])
            trial = study.ask()
            policy = self._draw(trial, base)
            if number not in self._log.draws:
                self._log.add(number, trial.params)
            spec = dataclasses.replace(base, policy=policy)
            self._waiting.setdefault(spec.named, []).append((condition, trial))
            yield spec

    def _draw(self, trial: optuna.trial.Trial, base: Launch) -> str:
        space = self._space
        template = trial.suggest_categorical("policy", space.policies)
        values = {
            name: _suggest(trial, name, space.parameters[name])
            for name in space.parameters_of(template)
        }
        return fill(template, values, base.wave, base.seed)


Search = GridSearch | DrawnSearch
"""What a sweep asks for trials: at most `total`; `learns`: one depends on how others ended."""


def make_search(
    space: Space, baselines: Sequence[Launch], kind: str, trials: int | None, seed: int,
    objective: str, log: Draws, note: Callable[[str], None],
) -> Search:  # fmt: skip
    """The strategy by its name.

    Args:
        space, baselines: what is swept, and the conditions.
        kind: ``"grid"``, ``"random"`` or ``"tpe"``.
        trials: draws; None for a grid.
        seed: of the draws.
        objective: what `tpe` minimises.
        log: keeps what was drawn.
        note: told what is left out.

    Raises:
        InputError: trials asked of a grid, or not of another search.
    """
    if kind == "grid":
        if trials is not None:
            raise InputError("--trials goes with --search random or tpe; a grid runs all of it.")
        return GridSearch(space, baselines, note)
    if trials is None:
        raise InputError(f"--search {kind} needs --trials N.")
    return DrawnSearch(space, baselines, kind, trials, seed, objective, log)


def _suggest(trial: optuna.trial.Trial, name: str, values: Sequence[Value] | Range) -> Value:
    if not isinstance(values, Range):
        chosen: Value = trial.suggest_categorical(name, values)
        return chosen
    if values.whole:
        step = 1 if values.step is None else int(values.step)
        low, high = int(values.low), int(values.high)
        return int(trial.suggest_int(name, low, high, step=step, log=values.log))
    drawn = trial.suggest_float(name, values.low, values.high, step=values.step, log=values.log)
    return float(f"{drawn:.6g}")  # what stands in the policy is what runs
