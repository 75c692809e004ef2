"""The interface that every backend implements, and a launch bound to data."""

from __future__ import annotations

import abc
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from wavealign.errors import InputError
from wavealign.gpu.capabilities import Capabilities, Problem

if TYPE_CHECKING:
    import torch

    from wavealign.gpu.inputs import Inputs
    from wavealign.gpu.lists import KernelLists


@dataclass(frozen=True, eq=False)
class BoundKernel:
    """A kernel with its arguments.

    Attributes:
        launch: starts it on the current stream and returns output ``[B, tokens, H, D]`` and
            log-sum-exp (natural logarithm) ``[B, H, tokens]``, rows as launched.
        buffers: where it writes, if that is fixed; empty where each launch allocates.
    """

    launch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    buffers: tuple[torch.Tensor, ...] = ()


class Backend(abc.ABC):
    """One attention kernel. Subclasses hold no state beyond what makes a launch cheap.

    Attributes:
        name: on the command line and in result rows.
        title: for people.
        capabilities: what it takes.
        needs: modules that have to be there, each with the extra that brings it.
        distribution: whose version is that of what computes.
        kernels_per_launch: kernels that a launch starts; the slowest one is the attention.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[tuple[tuple[str, str], ...]]
    distribution: ClassVar[str]
    kernels_per_launch: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities]

    def missing(self) -> str | None:
        """What this installation lacks for it, with the line that installs it; None if nothing."""
        return next(filter(None, (_lacks(*need) for need in self.needs)), None)

    def version(self) -> str:
        """Of what computes, e.g. ``"flash-attn-4 4.0.0b36"``."""
        try:
            return f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except importlib.metadata.PackageNotFoundError:
            return self.distribution

    @abc.abstractmethod
    def bind(self, problem: Problem, lists: KernelLists, inputs: Inputs) -> BoundKernel:
        """The kernel over these lists.

        Args:
            problem: what the backend hasn't refused.
            lists: see `kernel_lists`.
            inputs: K, V, and Q: ``[B, M * block_q, H, D]`` in launch order for gathered rows,
                else ``[B, tokens_q, H, D]``.
        """

    @abc.abstractmethod
    def bind_dense(self, problem: Problem, inputs: Inputs) -> BoundKernel:
        """The same kernel over every K/V block: what sparsity is compared with."""

    def rows_per_sm(self, problem: Problem) -> int:
        """Rows in flight on one SM."""
        del problem
        return self.capabilities.ctas_per_sm

    def check(self, problem: Problem, compute_capability: tuple[int, int]) -> None:
        """Raise unless the backend computes this problem right.

        Raises:
            InputError: the backend's name and the reason.
        """
        if reason := self.capabilities.refusal(problem, compute_capability):
            raise InputError(f"backend '{self.name}' {reason}.")


def _lacks(module: str, extra: str) -> str | None:
    """A sentence if a module isn't installed, with the line that installs it."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the module's parent
        found = False
    return None if found else f"{module} isn't installed: pip install 'wavealign[{extra}]'"
