"""Q and K of a natural video: a stand-in where no video model is at hand.

Frames go one by one through a pretrained image ViT whose patches lie on the video model's token
grid; the projections of chosen layers get 3D rotary position, and each head a temperature that
spreads the heads' concentrations as published for a video model. Real image content and trained
projections, but no video model: no noise, no attention between frames, 64 elements a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wavealign.errors import InputError, unknown_name
from wavealign.qk.clip import read_frames
from wavealign.qk.concentration import PROFILES, key_share, scale_for, sorted_logits, target_shares
from wavealign.qk.grid import TokenGrid
from wavealign.qk.rope import axial_angles, rotate
from wavealign.qk.sources import InMemory
from wavealign.qk.vit import ImageViT

DEFAULT_LAYERS = (2, 5, 8, 11)
NOTE = (
    "Q and K are real image content and trained projections (a pretrained image ViT on a natural "
    "video), not a video model."
)
_THETA = 1e4


@dataclass(frozen=True)
class ClipSource(InMemory):
    """Q and K of a clip, float16 in raster order, made by `ClipSource.make`.

    Heads are layer by layer.

    Attributes:
        about: for a mask's meta.
    """

    about: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """What it is, for a mask's meta."""
        return self.about

    @classmethod
    def make(
        cls, path: str | Path, vit: ImageViT, grid: TokenGrid,
        layers: Sequence[int] = DEFAULT_LAYERS, step: int = 4, profile: str | None = "wan2.1",
        device: str = "cpu", on_frame: Callable[[int], None] | None = None,
    ) -> ClipSource:  # fmt: skip
        """Run the clip.

        Args:
            path: the video file.
            vit: the image ViT.
            grid: the token grid; a frame of the clip is resized to a patch a token.
            layers: whose heads, in this order.
            step: every `step`-th frame of the clip is a frame of the grid.
            profile: of `PROFILES`, to calibrate the heads' temperatures to; None leaves them.
            device: where to compute.
            on_frame: called after every frame.

        Raises:
            InputError: a clip that can't be decoded or is too short, layers that the ViT
                doesn't have, an unknown profile.
        """
        if profile is not None and profile not in PROFILES:
            raise unknown_name("profile", profile, [*PROFILES, "none"])
        once = {*layers} & {*range(vit.layers)}
        if not layers or len(once) != len(layers):
            raise InputError(
                f"layers {list(layers)}: expected some of 0 to {vit.layers - 1}, each once."
            )
        q, k = _run(path, vit.to(device), grid, layers, step, device, on_frame)
        angles = axial_angles(grid, rotary_dims(vit.head_dim), _THETA)
        for x in (q, k):
            for head in range(len(x)):
                x[head] = rotate(x[head].float(), angles).half()
        about: dict[str, Any] = {
            "qk": Path(path).name, "note": NOTE,
            "vit_heads": [[layer, head] for layer in layers for head in range(vit.heads)],
            "clip_step": step, "profile": profile or "none",
        }  # fmt: skip
        if profile is not None:
            scales = _calibrate(q, k, profile, device)
            about["query_scale"] = [round(scale, 4) for scale in scales]
        return cls(q, k, about)


def rotary_dims(head_dim: int) -> tuple[int, int, int]:
    """Elements for time, height and width: about a third each, even, time the rest (24/20/20)."""
    space = head_dim // 3 // 2 * 2
    return head_dim - 2 * space, space, space


def _run(
    path: str | Path, vit: ImageViT, grid: TokenGrid, layers: Sequence[int], step: int, device: str,
    on_frame: Callable[[int], None] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (len(layers) * vit.heads, grid.tokens, vit.head_dim)
    q, k = torch.empty(shape, dtype=torch.float16), torch.empty(shape, dtype=torch.float16)
    per_frame = grid.height * grid.width
    size = (grid.height * vit.patch, grid.width * vit.patch)
    with torch.inference_mode():
        for index, frame in enumerate(read_frames(path, grid.frames, step)):
            image = torch.from_numpy(frame).to(device).permute(2, 0, 1).float() / 255
            image = functional.interpolate(
                image[None], size=size, mode="bicubic", align_corners=False, antialias=True
            )[0].clamp_(0, 1)
            found = vit.queries_and_keys(image, layers)
            place = slice(index * per_frame, (index + 1) * per_frame)
            for which, layer in enumerate(layers):
                heads = slice(which * vit.heads, (which + 1) * vit.heads)
                for kept, x in zip((q, k), found[layer], strict=True):
                    kept[heads, place] = x.half().cpu()
            if on_frame is not None:
                on_frame(index)
    return q, k


def _calibrate(q: Tensor, k: Tensor, profile: str, device: str) -> list[float]:
    """Scale the queries in place: the most concentrated head gets the smallest share, and so on."""
    logits = [sorted_logits(a.to(device), b.to(device)).cpu() for a, b in zip(q, k, strict=True)]
    natural = torch.tensor([key_share(x, 1.0) for x in logits])
    shares = target_shares(profile, len(logits))
    scales = [1.0] * len(logits)
    for share, head in zip(shares, natural.argsort(stable=True).tolist(), strict=True):
        scales[head] = scale_for(logits[head], share)
        # In fp16: large scales must not overflow where a query is long.
        q[head] = (q[head].float() * scales[head]).clamp_(-6e4, 6e4).half()
    return scales
