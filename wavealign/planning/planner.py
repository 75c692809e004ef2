"""The planner: a mask on a device to what a kernel reads there, in buffers made once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wavealign.errors import InputError
from wavealign.masks.block_mask import HeadMask
from wavealign.order.context import Draw, OrderContext
from wavealign.order.visits import VisitOrder, draw_kv_order
from wavealign.planning import row_orders
from wavealign.planning.following import Following
from wavealign.planning.layout import ListLayout
from wavealign.planning.lists import DeviceSchedule
from wavealign.planning.masks import dense_mask
from wavealign.planning.phases import entry_skips
from wavealign.planning.recipes import Recipe, recipes_per_head
from wavealign.planning.spectra import RANK
from wavealign.planning.visits import Walk, row_counts, write_lists, write_places

_MOST_COLUMNS = 32768


class Planner:
    """Plans masks of one shape on one device; each call overwrites the schedule of the last.

    A call starts work on the device and never waits for it; once the policies in use have been
    planned once, it can be captured in a CUDA graph. Buffers take ``4·H·M·(width + 5)`` bytes, a
    call in addition about ``17·H·M`` bytes and, for `svd`, at most 1.2 GiB; `follow` keeps these,
    and a mask's ``H·M·N``. Calls come from one thread at a time, on one stream.

    Attributes:
        edition: calls that have begun to write: a schedule is that of its call only while the
            edition is, so one that was broken off half-way passes for nobody's.
    """

    def __init__(
        self, shape: tuple[int, int, int], device: str | torch.device, *, wave: int, seed: int = 0,
        width: int | None = None, layout: ListLayout | None = None,
    ) -> None:  # fmt: skip
        """Allocate.

        Args:
            shape: ``(H, M, N)``; a batch of masks counts as more heads.
            device: of the masks.
            wave: rows in flight, W.
            seed: of every random choice; head `h` draws from its own stream.
            width: entries of a row's list; by default N. A row that keeps more loses the rest:
                for callers who know better (`DeviceSchedule.to_schedule` refuses).
            layout: what the kernel wants.

        Raises:
            InputError: sizes below 1, or more K/V blocks than the kernels are made for.
        """
        H, M, N = shape
        if min(shape) < 1 or wave < 1 or (width is not None and width < 1):
            raise InputError(f"shape {shape}, wave {wave}, width {width}; expected at least 1.")
        if N > _MOST_COLUMNS:
            raise InputError(f"{N} K/V blocks; a planner takes at most {_MOST_COLUMNS}.")
        self.shape, self.wave, self.seed = (H, M, N), wave, seed
        self.device = torch.device(device)
        self.layout, self.edition = layout or ListLayout(), 0
        width = width or N
        with torch.inference_mode(False):  # buffers that may be written in any mode later
            self._table = torch.empty(H, M, dtype=torch.int32, device=self.device)
            self._counts = torch.empty(H, M, dtype=torch.int32, device=self.device)
            self._starts = width * torch.arange(H * M, dtype=torch.int64, device=self.device)
            self._indices = torch.zeros(H, M, width, dtype=torch.int32, device=self.device)
        self._kv_orders: dict[tuple[bool, ...], Tensor] = {}
        self._flags: dict[tuple[bool, ...], Tensor] = {}
        self._solver_start: Tensor | None = None
        self._following = Following(self.shape, self.device)

    def __call__(self, mask: Tensor, policies: str | Sequence[str] = "lockstep") -> DeviceSchedule:
        """Plan a mask.

        Args:
            mask: bool ``[H, M, N]`` or ``[B, H, M, N]`` (heads of all sequences in turn).
            policies: one for all heads, or one a head.

        Returns:
            The schedule, in this planner's buffers.

        Raises:
            InputError: a mask of another shape or on another device, an unusable policy.
        """
        kept, recipes = self._checked(mask, policies)
        self._following.begin()
        self._write(kept, recipes)
        return self._schedule(recipes)

    def follow(self, mask: Tensor, policies: str | Sequence[str] = "lockstep") -> DeviceSchedule:
        """Plan a mask, or leave the lists as they are where they are its already.

        The mask's content decides, by whatever road it got there. On a GPU the device compares, the
        host doesn't wait for it.

        Args:
            mask, policies: see `__call__`.

        Returns:
            The schedule, in this planner's buffers.

        Raises:
            InputError: see `__call__`.
        """
        kept, recipes = self._checked(mask, policies)
        names = tuple(recipe.name for recipe in recipes)
        self._following.update(kept, names, lambda source: self._write(source, recipes))
        return self._schedule(recipes)

    def _checked(
        self, mask: Tensor, policies: str | Sequence[str]
    ) -> tuple[Tensor, Sequence[Recipe]]:
        """Of a call that may begin to write."""
        kept = dense_mask(mask)
        if kept.shape != self.shape or kept.device != self._table.device:
            raise InputError(
                f"a mask {list(kept.shape)} on {kept.device}; this planner is for "
                f"{list(self.shape)} on {self._table.device}."
            )
        recipes = recipes_per_head(policies, self.shape[0])
        self.edition += 1
        return kept, recipes

    def _write(self, kept: Tensor, recipes: Sequence[Recipe]) -> None:
        visits, N = [recipe.visits for recipe in recipes], self.shape[2]
        counts = row_counts(kept)
        rows = row_orders.Rows(kept, counts, self.wave, self._start)
        order = self._row_orders(rows, recipes)
        slots = torch.argsort(order, dim=-1)
        self._table.copy_(order)
        self._counts.copy_(counts.gather(-1, order) if self.layout.gathers else counts)
        kv_orders = self._kv_orders_of(visits)
        odd = slots // self.wave % 2 == 1
        backwards = odd & self._flag([v.sawtooth for v in visits])[:, None]
        if any(v.phased for v in visits):
            # The lists' own buffer holds the places first: they are as many.
            write_places(kept, counts, kv_orders, self._indices)
            phased = self._flag([v.phased for v in visits])
            skips = entry_skips(self._table, counts, self._indices, phased, self.wave, N)
        else:
            skips = torch.zeros_like(counts)
        walk = Walk(kv_orders, backwards, skips)
        write_lists(kept, counts, walk, slots, self.layout, self._indices)

    def _schedule(self, recipes: Sequence[Recipe]) -> DeviceSchedule:
        names = tuple(recipe.name for recipe in recipes)
        return DeviceSchedule(
            self._table, self._counts, self._starts, self._indices, self.shape[2], self.layout,
            names,
        )  # fmt: skip

    def kv_orders(self, policies: str | Sequence[str]) -> Tensor:
        """Int32 ``[H, N]``: each head's K/V order under these policies, place → K/V block."""
        return self._kv_orders_of([r.visits for r in recipes_per_head(policies, self.shape[0])])

    def _row_orders(self, rows: row_orders.Rows, recipes: Sequence[Recipe]) -> Tensor:
        keys = [(recipe.rows, recipe.inside_waves) for recipe in recipes]
        made = {key: row_orders.row_order(*key, rows) for key in dict.fromkeys(keys)}
        chosen = made[keys[0]]
        for key, order in list(made.items())[1:]:
            chosen = torch.where(self._flag([k == key for k in keys])[:, None], order, chosen)
        return chosen

    def _start(self) -> Tensor:
        """Of the solver, drawn on the host once and kept on the device."""
        if self._solver_start is None:
            rng = OrderContext(self.wave, self.seed, 0).rng(Draw.SOLVER)
            start = rng.standard_normal((self.shape[2], RANK)).astype(np.float32)
            self._solver_start = torch.from_numpy(start).to(self.device)
        return self._solver_start

    def _kv_orders_of(self, visits: Sequence[VisitOrder]) -> Tensor:
        """int32 ``[H, N]``, drawn on the host once and kept on the device."""
        key = tuple(v.shuffled for v in visits)
        if key not in self._kv_orders:
            _, M, N = self.shape
            empty = HeadMask(np.zeros(M + 1, np.int64), np.zeros(0, np.int32), M, N)
            drawn = [
                draw_kv_order(empty, v, OrderContext(self.wave, self.seed, h))
                for h, v in enumerate(visits)
            ]
            self._kv_orders[key] = torch.from_numpy(np.stack(drawn)).to(self.device)
        return self._kv_orders[key]

    def _flag(self, values: Sequence[bool]) -> Tensor:
        """Bool ``[H]`` on the device, copied there once."""
        key = tuple(values)
        if key not in self._flags:
            self._flags[key] = torch.tensor(key, dtype=torch.bool, device=self.device)
        return self._flags[key]
