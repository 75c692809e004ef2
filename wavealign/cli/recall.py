"""How much of the attention a mask keeps, for `wavealign mask info --qk`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from wavealign._extras import require
from wavealign.errors import InputError
from wavealign.masks import BlockMask
from wavealign.structures import Count, Size, structured


class _Parameters(msgspec.Struct, frozen=True):
    """Of the method, what recall depends on."""

    causal: bool = False
    tile: tuple[Size, Size, Size] | None = None


class _Made(msgspec.Struct):
    """What a mask's meta says of how it was made; `wavealign capture` writes numbers as text."""

    heads: list[Count] | None = None
    order: str = "raster"
    text_tokens: Count | Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")] = 0
    grid: tuple[Size, Size, Size] | str | None = None
    parameters: _Parameters = _Parameters()


def recall_of(
    mask: BlockMask, path: str, heads: Sequence[int], device: str, quiet: bool
) -> list[float]:
    """Attention mass kept, head by head.

    The mask's meta says which heads of the file it was made of and in which token order; a
    mask that doesn't is taken to be in raster order, its heads in the order of the file.

    Args:
        mask: the chosen heads.
        path: file of Q and K.
        heads: where the chosen heads stand in the mask file.
        device: "cpu" or "cuda".
        quiet: no progress.

    Raises:
        InputError: Q and K that don't fit the mask.
    """
    require("torch", "methods", "--qk")
    import torch

    from wavealign.cli.qk import check_device
    from wavealign.methods.context import HeadContext
    from wavealign.methods.exact import block_mass, recall
    from wavealign.methods.make import place_tokens
    from wavealign.qk import TokenGrid, token_order
    from wavealign.qk.sources import FileSource
    from wavealign.report.progress import Progress

    check_device(device)
    made = structured(dict(mask.meta), _Made, "the mask's meta")
    with FileSource(path) as source, Progress(mask.H, "recall", quiet) as progress:
        if (source.tokens, source.tokens) != (mask.tokens_q, mask.tokens_kv):
            raise InputError(
                f"{path}: holds {source.tokens} tokens; the mask is of {mask.tokens_q} queries and "
                f"{mask.tokens_kv} keys."
            )
        made_of = made.heads or range(max(heads) + 1)
        places = None
        if made.order != "raster":
            if made.grid is None:
                raise InputError(f"the mask's meta says order {made.order} and no grid.")
            written = made.grid
            grid = TokenGrid.parse(written) if isinstance(written, str) else TokenGrid(*written)
            places = token_order(made.order, grid, made.parameters.tile)
        found = []
        for index, head in enumerate(heads):
            if head >= len(made_of) or made_of[head] >= source.heads:
                raise InputError(
                    f"{path}: holds {source.heads} heads; the mask's head {head} isn't among them."
                )
            context = HeadContext(
                made_of[head], source.tokens, order=places, text_tokens=int(made.text_tokens)
            )
            with torch.inference_mode():
                pair = source.read(context.head)
                q, k = place_tokens(pair, context, device, f"head {context.head}")
                mass = block_mass(q, k, mask.block_q, mask.block_kv, made.parameters.causal)
                keep = torch.from_numpy(mask.head(index).to_dense()).to(mass.device)
                found.append(recall(mass, keep, mask.tokens_q, mask.block_q))
            progress.advance(f"head {head}")
    return found
