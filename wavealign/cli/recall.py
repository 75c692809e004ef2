"""How much of the attention a mask keeps, for `wavealign mask info --qk`."""

from __future__ import annotations

from collections.abc import Sequence

from wavealign._extras import require
from wavealign.errors import InputError
from wavealign.masks import BlockMask


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
    meta = mask.meta
    with FileSource(path) as source, Progress(mask.H, "recall", quiet) as progress:
        if (source.tokens, source.tokens) != (mask.tokens_q, mask.tokens_kv):
            raise InputError(
                f"{path}: holds {source.tokens} tokens; the mask is of {mask.tokens_q} queries and "
                f"{mask.tokens_kv} keys."
            )
        made_of = meta.get("heads", range(max(heads) + 1))
        order, text = meta.get("order", "raster"), int(meta.get("text_tokens", 0))
        parameters = dict(meta.get("parameters", {}))
        causal, tile = bool(parameters.get("causal", False)), parameters.get("tile")
        ordered = order != "raster"
        places = token_order(order, TokenGrid(*meta["grid"]), tile) if ordered else None
        found = []
        for index, head in enumerate(heads):
            if head >= len(made_of) or made_of[head] >= source.heads:
                raise InputError(
                    f"{path}: holds {source.heads} heads; the mask's head {head} isn't among them."
                )
            context = HeadContext(made_of[head], source.tokens, order=places, text_tokens=text)
            with torch.inference_mode():
                pair = source.read(context.head)
                q, k = place_tokens(pair, context, device, f"head {context.head}")
                mass = block_mass(q, k, mask.block_q, mask.block_kv, causal)
                keep = torch.from_numpy(mask.head(index).to_dense()).to(mass.device)
                found.append(recall(mass, keep, mask.tokens_q, mask.block_q))
            progress.advance(f"head {head}")
    return found
