"""The sessions by name: GSRS, AdaSpa, LiteAttention, and top-k as their control.

Each takes what its rule takes, by default as the rule says, and the options of `Session`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from wavealign.errors import unknown_name
from wavealign.sessions.adaspa import AdaSpa
from wavealign.sessions.gsrs import Gsrs
from wavealign.sessions.liteattention import LiteAttention
from wavealign.sessions.session import Session


class GsrsSession(Session):
    """GSRS, also as ``wavealign.methods.gsrs.Session``.

    Args:
        search_steps, p, steps, reduced, dense_text: see `Gsrs`.
        block, options: see `Session`.
    """

    def __init__(
        self, search_steps: Sequence[int] = Gsrs.search_steps, p: Sequence[float] = Gsrs.p,
        block: tuple[int, int] = (128, 128), steps: int = Gsrs.steps, *,
        reduced: bool = Gsrs.reduced, dense_text: bool = Gsrs.dense_text, **options: Any,
    ) -> None:  # fmt: skip
        rule = Gsrs(search_steps, p, steps, reduced=reduced, dense_text=dense_text)
        super().__init__(rule, block=block, **options)


class TopKSession(Session):
    """The same share of blocks in every row, by exact weights of all blocks at each search.

    Args:
        search_steps, keep, steps, dense_text: see `Gsrs`.
        block, options: see `Session`.
    """

    def __init__(
        self, search_steps: Sequence[int] = Gsrs.search_steps, keep: float = Gsrs.keep,
        block: tuple[int, int] = (128, 128), steps: int = Gsrs.steps, *,
        dense_text: bool = Gsrs.dense_text, **options: Any,
    ) -> None:  # fmt: skip
        rule = Gsrs(search_steps, (), steps, "top-k", keep, False, dense_text, "topk")
        super().__init__(rule, block=block, **options)


class AdaSpaSession(Session):
    """AdaSpa, also as ``wavealign.methods.adaspa.Session``.

    The paper's blocks have 64 tokens, ours 128 by default, so that sessions compare.

    Args:
        search_steps, sparsity, steps, head_adaptive, cached_lse, dense_text: see `AdaSpa`.
        block, options: see `Session`.
    """

    def __init__(
        self, search_steps: Sequence[int] = AdaSpa.search_steps, sparsity: float = AdaSpa.sparsity,
        block: tuple[int, int] = (128, 128), steps: int = AdaSpa.steps, *,
        head_adaptive: bool = AdaSpa.head_adaptive, cached_lse: bool = AdaSpa.cached_lse,
        dense_text: bool = AdaSpa.dense_text, **options: Any,
    ) -> None:  # fmt: skip
        rule = AdaSpa(search_steps, sparsity, steps, head_adaptive, cached_lse, dense_text)
        super().__init__(rule, block=block, **options)


class LiteAttentionSession(Session):
    """LiteAttention, also as ``wavealign.methods.liteattention.Session``.

    Upstream's tiles have 128 x 176 tokens at 128 elements a head; ours 128 x 128 by default.

    Args:
        threshold, warmup, steps, dense_text: see `LiteAttention`.
        block, options: see `Session`.
    """

    def __init__(
        self, threshold: float = LiteAttention.threshold, warmup: int = LiteAttention.warmup,
        block: tuple[int, int] = (128, 128), steps: int = LiteAttention.steps, *,
        dense_text: bool = LiteAttention.dense_text, **options: Any,
    ) -> None:  # fmt: skip
        rule = LiteAttention(threshold, warmup, steps, dense_text)
        super().__init__(rule, block=block, **options)


SESSIONS: dict[str, type[Session]] = {
    "gsrs": GsrsSession, "adaspa": AdaSpaSession, "liteattention": LiteAttentionSession,
    "topk": TopKSession,
}  # fmt: skip


def make_session(name: str, **options: Any) -> Session:
    """A session by its method's name.

    Args:
        name: one of `SESSIONS`.
        options: of its class, and of `Session`.

    Raises:
        InputError: an unknown name or option, or what the class raises.
    """
    if name not in SESSIONS:
        raise unknown_name("session", name, SESSIONS)
    kind = SESSIONS[name]
    valid = {
        parameter.name
        for made in (kind, Session)
        for parameter in inspect.signature(made).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "rule"
    }
    for option in options:
        if option not in valid:
            raise unknown_name("option", option, sorted(valid))
    return kind(**options)
