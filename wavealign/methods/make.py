"""From Q and K to a block mask: check, put in token order, run the method, by heads or by head."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavealign._version import __version__
from wavealign.errors import InputError
from wavealign.masks import BlockMask
from wavealign.methods.context import HeadContext
from wavealign.methods.registry import Method, find_method
from wavealign.methods.select import lower_triangle
from wavealign.methods.settings import Params
from wavealign.qk.grid import TokenGrid
from wavealign.qk.sources import QKSource

BoolArray = npt.NDArray[np.bool_]

_BATCH_BYTES = 2**31  # of Q and K that go to the GPU at once, for a method that takes many heads


def make_mask(
    method: str, source: QKSource | None, params: Params | None = None, *,
    heads: Sequence[int] | None = None, grid: TokenGrid | None = None, order: str = "raster",
    text_tokens: int = 0, seed: int = 0, device: str = "cpu",
    on_head: Callable[[int], None] | None = None,
) -> BlockMask:  # fmt: skip
    """The mask that a method makes.

    Args:
        method: name, see `METHODS`.
        source: of Q and K, tokens in raster order; None for a method that needs none, which
            then makes the heads of `heads` (one by default) on `grid`.
        params: default where None.
        heads: which heads, in this order; default: all.
        grid: the video's token grid; needed by token orders and by some methods.
        order: token order, see `wavealign.qk.ORDERS`; Q and K are put into it first.
        text_tokens: tokens of text behind the video, which keep their places.
        seed: of every random choice.
        device: "cpu" or "cuda"; heads are sent there one at a time, or, by a method that takes
            many at once on a GPU, up to 2 GiB of Q and K.
        on_head: called after every head.

    Raises:
        InputError: Q or K with NaN or inf, a sequence shorter than a block, a grid that doesn't
            fit the sequence, parameters of another method.
    """
    chosen = find_method(method)
    settings = chosen.settings(params)
    tokens = _tokens(chosen, source, grid, text_tokens)
    tile = getattr(settings, "tile", None)
    context = HeadContext.make(tokens, grid, order, text_tokens, seed, tile)
    block = settings.block_size()
    if context.tokens < max(block):
        raise InputError(
            f"{context.tokens} tokens are shorter than a block of {max(block)}; expected at least "
            "one whole block."
        )
    if heads is None:
        heads = range(source.heads) if source is not None else range(1)
    masks: list[BoolArray] = []
    at_once = _heads_at_once(chosen, source, device)
    for first in range(0, len(heads), at_once):
        some = heads[first : first + at_once]
        contexts = [dataclasses.replace(context, head=head) for head in some]
        masks += _some_heads(chosen, source, settings, contexts, device)
        if on_head is not None:
            for head in some:
                on_head(head)
    meta: dict[str, Any] = {
        "method": method, "parameters": dataclasses.asdict(settings), "heads": list(heads),
        "order": order, "version": __version__,
    }  # fmt: skip
    if grid is not None:
        meta["grid"] = list(grid.shape)
    if text_tokens:
        meta["text_tokens"] = text_tokens
    if chosen.name == "random":
        meta["seed"] = seed
    if source is not None:
        meta.update(source.describe())
    return BlockMask.from_dense(np.stack(masks), block, (context.tokens, context.tokens), meta)


def head_mask(
    method: str, q: Tensor, k: Tensor, params: Params | None = None,
    context: HeadContext | None = None, *, site: HeadContext | None = None,
) -> Tensor:  # fmt: skip
    """The mask of one head from tensors in token order, bool ``(M, N)`` on their device.

    A head whose Q or K holds NaN or inf keeps everything, as for `head_masks`.

    Args:
        method: a method that looks at Q and K.
        q, k: float ``(L, D)``.
        params: default where None.
        context: where the tokens lie; by default no grid and no text.
        site: what `context` was called.

    Raises:
        InputError: a method that doesn't look at Q and K, or parameters of another.
    """
    chosen = _qk_method(method)
    context = _context_of_call(context, site, len(q))
    return _all_heads(chosen, q[None, None], k[None, None], chosen.settings(params), [context])[
        0, 0
    ]


def head_masks(
    method: str, q: Tensor, k: Tensor, params: Params | None = None,
    context: HeadContext | None = None, *, site: HeadContext | None = None,
) -> Tensor:  # fmt: skip
    """The masks of many heads from tensors in token order, on their device.

    A method with a batched form (xattention) does all heads at once on a GPU, without waiting for
    it; the others go head by head. Views aren't copied. A head whose Q or K holds NaN or inf keeps
    everything: attention over it is dense attention's, NaN where that is.

    Args:
        method: a method that looks at Q and K.
        q: float ``(H, L, D)`` or ``(B, L, H, D)``.
        k: the same, with as many heads or a divisor of them (grouped queries).
        params: default where None.
        context: where the tokens lie, the same for all heads; by default no grid and no text.
        site: what `context` was called.

    Returns:
        bool ``(H, M, N)`` or ``(B, H, M, N)``.

    Raises:
        InputError: other shapes, a method that doesn't look at Q and K, or parameters of another.
    """
    chosen = _qk_method(method)
    axis = {3: 0, 4: 2}.get(q.ndim, 0)  # of the heads
    rest = [(*x.shape[:axis], *x.shape[axis + 1 :]) for x in (q, k)]
    if (
        q.ndim not in (3, 4)
        or rest[0] != rest[1]
        or 0 in (*q.shape, *k.shape)
        or q.shape[axis] % k.shape[axis]
    ):
        raise InputError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}; expected [H, L, D] or "
            "[B, L, H, D] each, the heads of k a divisor of those of q, and all else the same."
        )
    queries, keys = (x[None] if x.ndim == 3 else x.transpose(1, 2) for x in (q, k))
    context = _context_of_call(context, site, queries.shape[2])
    contexts = [dataclasses.replace(context, head=h) for h in range(queries.shape[1])]
    keep = _all_heads(chosen, queries, keys, chosen.settings(params), contexts)
    return keep[0] if q.ndim == 3 else keep


def _qk_method(name: str) -> Method:
    found = find_method(name)
    if not found.needs_qk:
        raise InputError(f"{name} doesn't look at Q and K; expected make_mask.")
    return found


def _all_heads(
    method: Method, q: Tensor, k: Tensor, params: Params, contexts: Sequence[HeadContext]
) -> Tensor:
    """Masks of ``[B, H, L, D]``, all at once where the method can, else head by head."""
    B, H = q.shape[:2]
    found: Tensor | None = None
    with torch.autocast(q.device.type, enabled=False):  # it would round the method's sums
        if method.batched is not None:
            found = _function(method.batched)(q, k, params)
        if found is None:
            one, group = _function(method.function), H // k.shape[1]
            heads = [
                one(q[b, h], k[b, h // group], params, context)
                for b in range(B)
                for h, context in enumerate(contexts)
            ]
            found = torch.stack(heads).view(B, H, *heads[0].shape)
    # A sum is NaN or inf where a part is, without a tensor of Q's size or a wait for the GPU.
    queries, keys = (x.sum((-2, -1), dtype=torch.float32).isfinite() for x in (q, k))
    broken = ~(queries & keys.repeat_interleave(H // k.shape[1], 1))[..., None, None]
    if getattr(params, "causal", False):
        broken = broken & lower_triangle(found[0, 0], *params.block_size())
    found |= broken
    return found


def _context_of_call(
    context: HeadContext | None, site: HeadContext | None, tokens: int
) -> HeadContext:
    if site is not None:
        warnings.warn("site= is now context=", DeprecationWarning, stacklevel=3)
    return context or site or HeadContext(0, tokens)


def place_tokens(
    qk: tuple[Tensor, Tensor], context: HeadContext, device: str, told: str
) -> tuple[Tensor, Tensor]:
    """Queries and keys ``(L, D)``, checked, in the context's token order, on the device.

    Args:
        qk: in raster order.
        context: where the tokens lie.
        device: "cpu" or "cuda".
        told: whose they are, for errors.

    Raises:
        InputError: NaN or inf.
    """
    pair = []
    for name, x in zip("qk", qk, strict=True):
        x = x.to(device)
        if x.dtype == torch.float64:
            x = x.float()
        finite = torch.isfinite(x).all(dim=-1)
        if not finite.all():
            token = int(torch.nonzero(~finite)[0])
            raise InputError(
                f"{name} of {told} holds NaN or inf at token {token}; expected finite "
                "numbers. Values beyond the range of fp16 may have been lost when it was saved."
            )
        if context.order is not None:
            index = torch.from_numpy(context.order).to(x.device)
            x = torch.cat([x[: context.video_tokens][index], x[context.video_tokens :]])
        pair.append(x)
    return pair[0], pair[1]


def _heads_at_once(method: Method, source: QKSource | None, device: str) -> int:
    """How many heads go to the device together; one where that wins nothing."""
    if source is None or method.batched is None or torch.device(device).type != "cuda":
        return 1
    return max(1, _BATCH_BYTES // (2 * source.tokens * source.head_dim * 4))


def _some_heads(
    method: Method,
    source: QKSource | None,
    params: Params,
    contexts: Sequence[HeadContext],
    device: str,
) -> list[BoolArray]:
    """Masks of heads, bool ``(M, N)`` each; of several only by a method that takes them."""
    if not method.needs_qk:
        function = _function(method.function)
        return [np.asarray(function(params, context), dtype=np.bool_) for context in contexts]
    assert source is not None
    with torch.inference_mode():
        pairs = [
            place_tokens(source.read(context.head), context, device, f"head {context.head}")
            for context in contexts
        ]
        # One head is no copy, and several are no more than go to the device at once.
        q, k = (x[0][None] if len(x) == 1 else torch.stack(x) for x in zip(*pairs, strict=True))
        found = _all_heads(method, q[None], k[None], params, contexts)[0]
        return list(found.cpu().numpy())


def _function(where: str) -> Callable[..., Any]:
    """A function of ``module:function`` below this package."""
    module, _, name = where.partition(":")
    home = importlib.import_module(f"wavealign.methods.{module}")
    found: Callable[..., Any] = getattr(home, name)
    return found


def _tokens(method: Method, source: QKSource | None, grid: TokenGrid | None, text: int) -> int:
    """Length of the sequence."""
    if source is not None:
        return source.tokens
    if method.needs_qk:
        raise InputError(f"{method.name} looks at Q and K; give it some, e.g. --qk FILE.")
    if grid is None:
        raise InputError(
            f"{method.name} needs a length: Q and K, or a token grid (--grid 21x45x80)."
        )
    return grid.tokens + text
