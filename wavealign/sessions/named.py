"""The sessions by name: GSRS, AdaSpa, LiteAttention, and top-k as their control.

Each takes what its rule takes, and the options of `Session`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wavealign.errors import unknown_name
from wavealign.sessions.adaspa import AdaSpa
from wavealign.sessions.gsrs import Gsrs
from wavealign.sessions.liteattention import LiteAttention
from wavealign.sessions.session import Session


class GsrsSession(Session):
    """GSRS; see `Gsrs` for what its parameters mean."""

    def __init__(
        self,
        search_steps: Sequence[int] = (10, 20, 30, 40),
        p: Sequence[float] = (0.95, 0.9, 0.85, 0.8),
        block: tuple[int, int] = (128, 128),
        steps: int = 50,
        *,
        reduced: bool = True,
        dense_text: bool = False,
        **options: Any,
    ) -> None:
        """A session before its first step; `options` are those of `Session`.

        Args:
            search_steps, p, steps, reduced, dense_text: see `Gsrs`.
            block, options: see `Session`.
        """
        rule = Gsrs(search_steps, p, steps, reduced=reduced, dense_text=dense_text)
        super().__init__(rule, block=block, **options)


class TopKSession(Session):
    """The same share of blocks in every row, by exact weights of all blocks at each search."""

    def __init__(
        self,
        search_steps: Sequence[int] = (10, 20, 30, 40),
        keep: float = 0.2,
        block: tuple[int, int] = (128, 128),
        steps: int = 50,
        *,
        dense_text: bool = False,
        **options: Any,
    ) -> None:
        """A session before its first step; `options` are those of `Session`.

        Args:
            search_steps, keep, steps, dense_text: see `Gsrs`.
            block, options: see `Session`.
        """
        rule = Gsrs(search_steps, (), steps, "top-k", keep, False, dense_text, "topk")
        super().__init__(rule, block=block, **options)


class AdaSpaSession(Session):
    """AdaSpa, also as ``wavealign.sessions.adaspa.Session``; see `AdaSpa`.

    The paper's blocks have 64 tokens, ours 128 by default, so that sessions compare.
    """

    def __init__(
        self,
        search_steps: Sequence[int] = (10, 30),
        sparsity: float = 0.8,
        block: tuple[int, int] = (128, 128),
        steps: int = 50,
        *,
        head_adaptive: bool = True,
        cached_lse: bool = True,
        dense_text: bool = True,
        **options: Any,
    ) -> None:
        """A session before its first step; `options` are those of `Session`.

        Args:
            search_steps, sparsity, steps: see `AdaSpa`.
            head_adaptive, cached_lse, dense_text: see there.
            block, options: see `Session`.
        """
        rule = AdaSpa(search_steps, sparsity, steps, head_adaptive, cached_lse, dense_text)
        super().__init__(rule, block=block, **options)


class LiteAttentionSession(Session):
    """LiteAttention, also as ``wavealign.sessions.liteattention.Session``; see `LiteAttention`.

    Upstream's tiles have 128 x 176 tokens at 128 elements a head; ours 128 x 128 by default.
    """

    def __init__(
        self,
        threshold: float = -10.0,
        warmup: int = 0,
        block: tuple[int, int] = (128, 128),
        steps: int = 50,
        *,
        dense_text: bool = True,
        **options: Any,
    ) -> None:
        """A session before its first step; `options` are those of `Session`.

        Args:
            threshold, warmup, steps, dense_text: see `LiteAttention`.
            block, options: see `Session`.
        """
        super().__init__(
            LiteAttention(threshold, warmup, steps, dense_text), block=block, **options
        )


SESSIONS: dict[str, type[Session]] = {
    "gsrs": GsrsSession,
    "adaspa": AdaSpaSession,
    "liteattention": LiteAttentionSession,
    "topk": TopKSession,
}


def make_session(name: str, **options: Any) -> Session:
    """A session by its method's name.

    Args:
        name: one of `SESSIONS`.
        options: of its class, and of `Session`.

    Raises:
        InputError: an unknown name, or what the class raises.
    """
    if name not in SESSIONS:
        raise unknown_name("session", name, SESSIONS)
    return SESSIONS[name](**options)
