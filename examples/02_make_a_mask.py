"""Make a block mask from your own Q and K, and keep it in a file.

You will learn how a sparse-attention method (XAttention here) turns queries and keys into a mask,
and how the mask becomes a file that every `wavealign` command reads. Q and K are made up below:
the tokens of a small video attend to their neighbours in time and space. Put your model's tensors
in their place, after rotary position.

    pip install '.[methods]'
    python examples/02_make_a_mask.py

It prints the density of each head's mask and what the file was understood as.
"""

import math
import tempfile
from pathlib import Path

import torch

import wavealign as wa
from wavealign.methods import head_masks
from wavealign.qk import TokenGrid

generator = torch.Generator().manual_seed(0)
grid = TokenGrid(8, 16, 24)  # frames, height, width in tokens
places = torch.cartesian_prod(*(torch.linspace(0, 1, n) for n in grid.shape))
heads = []
for reach in (2.0, 8.0):  # the second head looks at nearer tokens
    phases = places @ torch.randn(3, 32, generator=generator) * reach
    features = torch.cat([phases.cos(), phases.sin()], 1)
    heads.append(features + 0.1 * torch.randn(features.shape, generator=generator))
k = torch.stack(heads)  # [H, tokens, D]
q = k * math.sqrt(k.shape[-1])

kept = head_masks("xattention", q, k)  # bool [H, M, N], on the device of Q and K
mask = wa.BlockMask.from_dense(kept.numpy(), (128, 128), (grid.tokens, grid.tokens))
print(f"{grid.tokens} tokens, {mask.H} heads of {mask.M} x {mask.N} blocks of 128 x 128")
for head in wa.mask_stats(mask)[1]:
    print(f"  head {head.head}: density {head.density:.2f}, overlap {head.neighbour_overlap:.2f}")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "masks.npz"
    wa.save_mask(path, mask)
    print(f"{path.name}, {path.stat().st_size} bytes:")
    for line in wa.load_mask(path).understood_as:
        print(f"  {line}")
