"""The mask methods again, from their definitions: float64, loops, nothing of the package."""

from __future__ import annotations

import math

import numpy as np


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def keep_top_p(row, share, inclusive):
    """One row: walk down the sorted scores until the share is reached."""
    keep = np.zeros(len(row), dtype=bool)
    total, held = row.sum(), 0.0
    for rank, column in enumerate(np.argsort(-row, kind="stable")):
        if inclusive and rank and held >= share * total:
            break
        held += row[column]
        if not inclusive and rank and held > share * total:
            break
        keep[column] = True
    return keep


def antidiagonal(q, k, stride, block, real_cells=None, causal=False):
    """Softmax over cells, summed over blocks; cells from `real_cells` on get no mass."""
    L, D = q.shape
    cells = L // stride
    logits = np.zeros((cells, cells))
    for s in range(stride):
        logits += q[stride - 1 - s :: stride] @ k[s::stride].T
    logits /= math.sqrt(D) * stride
    if real_cells is not None:
        logits[:, real_cells:] = -np.inf
    if causal:
        logits[np.triu_indices(cells, 1)] = -np.inf
    n = block // stride
    return softmax(logits).reshape(cells // n, n, cells // n, n).sum(axis=(1, 3))


def xattention_upstream_causal(q, k, stride, block, tau, chunk):
    """Upstream's plain path: each chunk of queries sees the keys of its own chunk only, and the
    first chunk keeps one block more (its forced column is overwritten)."""
    blocks, per_chunk = len(q) // block, chunk // block
    keep = np.zeros((blocks, blocks), dtype=bool)
    for c in range(0, blocks, per_chunk):
        part = slice(c * block, (c + per_chunk) * block)
        score = antidiagonal(q[part], k[part], stride, block, causal=True)
        for i in range(per_chunk):
            row = np.zeros(blocks)
            row[c : c + per_chunk] = score[i]
            forced = [c + i] if c == 0 else sorted({0, c + i})
            held = row[forced].sum()
            keep[c + i, [*forced, 0]] = True
            others = [j for j in np.argsort(-row, kind="stable") if j not in forced]
            before = [0.0, *([held] if c == 0 else []), *(held + np.cumsum(row[others]))]
            if c:
                before = [held, *(held + np.cumsum(row[others]))]
            for j, mass in zip(others, before, strict=False):
                if mass < tau * row.sum():
                    keep[c + i, j] = True
    return np.tril(keep)


def cosine_self_similarity(x, block):
    found = []
    for start in range(0, len(x), block):
        rows = x[start : start + block]
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        found.append(np.mean([a @ b for a in rows for b in rows]))
    return np.array(found)


def means(x, block):
    return np.array([x[i : i + block].mean(axis=0) for i in range(0, len(x), block)])


def spargeattn(q, k, block_q, block_kv, theta, select, value, dense_tail=True):
    k = k - k.mean(axis=0)
    q_fix = cosine_self_similarity(q, block_q) <= theta
    k_fix = cosine_self_similarity(k, block_kv) <= theta
    if dense_tail and len(q) % block_q:
        q_fix[-1] = True
    if dense_tail and len(k) % block_kv:
        k_fix[-1] = True
    scores = means(q, block_q) @ means(k, block_kv).T / math.sqrt(q.shape[1])
    scores[:, k_fix] = -np.inf
    share = softmax(scores)
    keep = np.zeros(share.shape, dtype=bool)
    for i, row in enumerate(share):
        if select == "cdf":
            keep[i] = keep_top_p(row, value, inclusive=False)
        else:
            keep[i, np.argsort(-row, kind="stable")[: max(1, int(value * len(row)))]] = True
    keep[q_fix] = True
    keep[:, k_fix] = True
    return keep


def dense_attention(q, k, causal=False):
    logits = q @ k.T / math.sqrt(q.shape[1])
    if causal:
        logits[np.triu_indices(len(q), 1)] = -np.inf
    return softmax(logits)


def block_mass(q, k, block, causal=False):
    attention = dense_attention(q, k, causal)
    edges = np.arange(0, len(q), block)
    sums = np.add.reduceat(np.add.reduceat(attention, edges, axis=0), edges, axis=1)
    return sums / np.minimum(block, len(q) - edges)[:, None]


def vertical_slash(q, k, positions, block, verticals, slashes, sink, band, causal):
    """Token by token: which keys a block of queries reads, and the blocks they lie in."""
    L = len(q)
    attention = dense_attention(q, k, causal)[positions]
    column = attention.sum(axis=0)
    column[:sink] = np.inf
    offsets = list(range(0 if causal else -(L - 1), L))
    mass = []
    for o in offsets:
        found = sum(a[p - o] for a, p in zip(attention, positions, strict=True) if 0 <= p - o < L)
        mass.append(np.inf if abs(o) < band else found)
    kept_columns = np.argsort(-column, kind="stable")[:verticals]
    kept_offsets = [offsets[i] for i in np.argsort(-np.array(mass), kind="stable")[:slashes]]
    blocks = math.ceil(L / block)
    keep = np.zeros((blocks, blocks), dtype=bool)
    for m in range(blocks):
        keep[m, kept_columns // block] = True
        for o in kept_offsets:
            keys = np.arange(m * block, (m + 1) * block) - o
            keep[m, np.unique(keys[(keys >= 0) & (keys < blocks * block)] // block)] = True
    return np.tril(keep) if causal else keep


def flexprefill_lines(q, k, positions, block, gamma, least):
    """The vertical-slash side of FlexPrefill without a triangle."""
    L = len(q)
    blocks = L // block
    attention = dense_attention(q, k)[positions] / len(positions)
    column = attention.sum(axis=0)
    diagonal = {}
    for a, p in zip(attention, positions, strict=True):
        for j in range(L):
            diagonal[p - j] = diagonal.get(p - j, 0) + a[j]

    def budget(values):
        covered = np.cumsum(np.sort(values)[::-1])
        return max((np.count_nonzero(covered <= gamma) + 1) // block + 1, least)

    by_block = column.reshape(blocks, block).sum(axis=1)
    by_block[0] = np.inf
    lines = dict.fromkeys(range(-(blocks - 1), blocks), 0.0)
    for o, mass in diagonal.items():
        lines[int(math.copysign(abs(o) // block, o))] += mass
    lines[0] = np.inf
    columns = np.argsort(-by_block, kind="stable")[: budget(column)]
    all_mass = np.zeros(2 * L - 1)
    all_mass[: len(diagonal)] = list(diagonal.values())
    chosen = sorted(lines, key=lambda d: (-lines[d], d))[: budget(all_mass)]
    keep = np.zeros((blocks, blocks), dtype=bool)
    keep[:, columns] = True
    for i in range(blocks):
        for d in chosen:
            if 0 <= i - d < blocks:
                keep[i, i - d] = True
    return keep


def radial(grid, decay, block, sink, text=0):
    """Token masks of every pair of frames, shrunk to blocks as the paper's code does."""
    frames, per_frame = grid[0], grid[1] * grid[2]
    L = frames * per_frame
    blocks = math.ceil((L + text) / block)
    keep = np.zeros((blocks, blocks), dtype=bool)
    place = np.arange(per_frame)
    for i in range(frames):
        for j in range(frames):
            distance = abs(i - j)
            length = 2 ** len(f"{per_frame:b}") / 2 ** (len(f"{distance:b}") if distance else 0)
            width = max(length * decay, block) if distance > 1 else per_frame
            local = np.abs(place[:, None] - place[None, :]) <= width
            if length < 128 and distance % int(128 / length):
                local[:] = False
            if j == 0 and sink:
                local[:] = True
            whole = np.zeros((blocks * block, blocks * block), dtype=bool)
            whole[i * per_frame : (i + 1) * per_frame, j * per_frame : (j + 1) * per_frame] = local
            # As many blocks as a frame has, from the first on that it has a token of.
            row, column = (f * per_frame // block + math.ceil(per_frame / block) for f in (i, j))
            whole[row * block :] = whole[:, column * block :] = False
            density = whole.reshape(blocks, block, blocks, block).sum(axis=1) / block
            touched = (density > 0).sum(axis=2)
            keep |= (density > 1 / 3).sum(axis=2) > 0.6 * np.maximum(touched, 1e-9)
    if L % block or text:
        keep[L // block :] = keep[:, L // block :] = True
    return keep


def window(grid, order, tile, size, block):
    """Token by token: near where the tiles are near."""
    coordinates = np.stack(np.unravel_index(order, grid), axis=-1) // tile
    counts = [math.ceil(n / t) for n, t in zip(grid, tile, strict=True)]
    blocks = math.ceil(len(order) / block)
    keep = np.zeros((blocks, blocks), dtype=bool)
    near = np.ones((len(order), len(order)), dtype=bool)
    for axis in range(3):
        width = min(size[axis], counts[axis])
        centre = np.clip(coordinates[:, axis], width // 2, counts[axis] - (width - width // 2))
        first = centre - width // 2
        key = coordinates[:, axis]
        near &= (key[None, :] >= first[:, None]) & (key[None, :] < first[:, None] + width)
    i, j = np.nonzero(near)
    keep[i // block, j // block] = True
    return keep
