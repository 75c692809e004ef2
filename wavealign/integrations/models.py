"""What is known of diffusers' video transformers: their attention, and how their tokens lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from wavealign.errors import InputError
from wavealign.qk.grid import TokenGrid

MODELS = {
    "WanTransformer3DModel": "wan",
    "LTXVideoTransformer3DModel": "ltx",
    "HunyuanVideoTransformer3DModel": "hunyuan_video",
    "HunyuanVideoFramepackTransformer3DModel": "hunyuan_video",
    "HunyuanVideo15Transformer3DModel": "hunyuan_video15",
}
"""Class -> module of its processors. Text, where it is in the sequence, is behind the video."""

BLOCK_LISTS = ("blocks", "transformer_blocks", "single_transformer_blocks")
_ATTENTIONS = ("attn1", "attn")


def self_attentions(transformer: nn.Module) -> list[Any]:
    """The self-attention of every block, block list by block list.

    Raises:
        InputError: no blocks with attention.
    """
    found = []
    for blocks in BLOCK_LISTS:
        for block in getattr(transformer, blocks, ()):
            attentions = [getattr(block, name, None) for name in _ATTENTIONS]
            found += [a for a in attentions if hasattr(a, "processor")][:1]
    if not found:
        raise InputError(
            f"{type(transformer).__name__}: no transformer blocks with attention found; expected "
            "a diffusers video transformer such as WanTransformer3DModel."
        )
    return found


def token_grid(model: nn.Module, given: Mapping[str, Any]) -> TokenGrid | None:
    """The grid of the video that a transformer is called with.

    Args:
        model: the transformer.
        given: its arguments: the sizes, or latents ``[batch, channels, frames, height, width]``.

    Returns:
        None where neither says it.
    """
    sizes = [given.get(name) for name in ("num_frames", "height", "width")]
    if all(isinstance(size, int) for size in sizes):
        return TokenGrid(*sizes)  # type: ignore[arg-type]
    latents, patch = given.get("hidden_states"), getattr(model, "config", None)
    patch = getattr(patch, "patch_size", None)
    if not isinstance(latents, Tensor) or latents.ndim != 5 or patch is None:
        return None
    if isinstance(patch, int):
        patch = (getattr(model.config, "patch_size_t", 1) or 1, patch, patch)
    frames, height, width = (n // p for n, p in zip(latents.shape[2:], patch, strict=True))
    return TokenGrid(frames, height, width)
