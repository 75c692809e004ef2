"""The block mask: container, statistics and file formats."""

from wavealign.masks.block_mask import BlockMask, HeadMask
from wavealign.masks.files import LoadedMask, load_mask, save_mask
from wavealign.masks.stats import MaskStats, mask_stats

__all__ = [
    "BlockMask", "HeadMask", "LoadedMask", "MaskStats", "load_mask", "mask_stats", "save_mask",
]  # fmt: skip
