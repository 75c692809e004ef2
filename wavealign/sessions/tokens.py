"""Token order of a session: video tokens along a curve, text at the end where it was."""

from __future__ import annotations

import numpy as np
import torch

from wavealign.errors import InputError, unknown_name
from wavealign.qk.grid import TokenGrid, check_tokens
from wavealign.qk.orders import ORDERS, invert, token_order


class TokenOrder:
    """Puts ``[B, L, H, D]`` into a token order and back.

    Attributes:
        name: of the order.
        text_tokens: at the end, which stay.
    """

    def __init__(self, name: str | None, grid: TokenGrid | None, text_tokens: int = 0) -> None:
        """An order.

        Args:
            name: one of `wavealign.qk.orders.ORDERS`; by default the generalized Hilbert curve
                where there is a grid, else raster, which moves nothing.
            grid: of the video tokens.
            text_tokens: behind them.

        Raises:
            InputError: an unknown name, or one that needs a grid.
        """
        self.name = name if name is not None else ("hilbert" if grid is not None else "raster")
        if self.name not in ORDERS:
            raise unknown_name("token order", self.name, ORDERS)
        if text_tokens < 0:
            raise InputError(f"text tokens: {text_tokens}; expected 0 or more.")
        if self.name != "raster" and grid is None:
            raise InputError(
                f"token order '{self.name}' needs the token grid, e.g. "
                "grid=TokenGrid(21, 45, 80), or order='raster'."
            )
        self.text_tokens, self._grid = text_tokens, grid
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def check(self, tokens: int) -> None:
        """Raise unless a sequence is as long as the grid and the text together.

        Raises:
            InputError: another length.
        """
        check_tokens(tokens, self._grid, self.text_tokens, "q")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raster order to this one."""
        return x if self.name == "raster" else x.index_select(1, self._moves(x.device)[0])

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """This order to raster order."""
        return x if self.name == "raster" else x.index_select(1, self._moves(x.device)[1])

    def _moves(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._places:
            assert self._grid is not None
            order = token_order(self.name, self._grid)
            text = np.arange(len(order), len(order) + self.text_tokens)
            whole = np.concatenate([order, text])
            with torch.inference_mode(False):
                forward, back = (torch.from_numpy(a).to(device) for a in (whole, invert(whole)))
            self._places[device] = forward, back
        return self._places[device]
