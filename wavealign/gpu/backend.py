"""The interface that every backend implements, and a kernel bound to data."""

from __future__ import annotations

import abc
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from wavealign._extras import installed
from wavealign.errors import InputError
from wavealign.gpu.capabilities import Capabilities
from wavealign.gpu.sizes import Sizes

if TYPE_CHECKING:
    from torch import Tensor

    from wavealign.gpu.inputs import Inputs
    from wavealign.planning.lists import DeviceSchedule


@dataclass(frozen=True, eq=False)
class BoundKernel:
    """A kernel with its arguments.

    Attributes:
        launch: starts it on the current stream of the current GPU, which has to be that of its
            tensors (`wavealign._devices.on_device`), and returns output ``[B, tokens, H, D]`` and
            log-sum-exp (natural logarithm) ``[B, H, tokens]``, rows as launched.
        buffers: where it writes, if that is fixed; empty where each launch allocates.
    """

    launch: Callable[[], tuple[Tensor, Tensor]]
    buffers: tuple[Tensor, ...] = ()


class Backend(abc.ABC):
    """One attention kernel. Subclasses hold no state beyond what makes a launch cheap.

    Whoever calls `bind` sees to the rest (`wavealign.gpu.execution`): rows are moved into launch
    order where the layout gathers them, and a batch with a mask for each sequence comes one
    sequence at a time.

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
        for module, extra in self.needs:
            if not installed(module):
                return f"{module} isn't installed: pip install 'wavealign[{extra}]'"
        return None

    def version(self) -> str:
        """Of what computes, e.g. ``"flash-attn-4 4.0.0b36"``."""
        try:
            return f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except importlib.metadata.PackageNotFoundError:
            return self.distribution

    @abc.abstractmethod
    def bind(self, sizes: Sizes, lists: DeviceSchedule, inputs: Inputs) -> BoundKernel:
        """The kernel over these lists.

        Args:
            sizes: of a launch that the backend hasn't refused; one mask for all sequences.
            lists: on the device of the inputs, in `Capabilities.layout_for` these sizes.
            inputs: K, V, and Q: ``[B, M * block_q, H, D]`` in launch order for gathered rows,
                else ``[B, tokens_q, H, D]``. See `takes_strides`.
        """

    def bind_dense(self, sizes: Sizes, inputs: Inputs) -> BoundKernel:
        """The same kernel over every K/V block: what sparsity is compared with.

        Args:
            sizes: see `bind`.
            inputs: Q, K and V as they come.
        """
        from wavealign.planning.lists import DeviceSchedule

        layout = self.capabilities.layout_for(sizes)
        lists = DeviceSchedule.full((sizes.H, sizes.M, sizes.N), layout, inputs.q.device)
        return self.bind(sizes, lists, inputs)

    def takes_strides(self) -> bool:
        """Whether Q, K and V may have any strides but for D; they are contiguous otherwise."""
        return False

    def rows_per_sm(self, sizes: Sizes) -> int:
        """Rows in flight on one SM."""
        del sizes
        return self.capabilities.ctas_per_sm

    def check(self, sizes: Sizes, compute_capability: tuple[int, int] | None) -> None:
        """Raise unless the backend computes launches of these sizes right.

        Raises:
            InputError: the backend's name and the reason.
        """
        if reason := self.capabilities.refusal(sizes, compute_capability):
            raise InputError(f"backend '{self.name}' {reason}.")
