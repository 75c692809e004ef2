"""What the sessions do, again from the definitions: numpy float64, one row at a time, no memory."""

from __future__ import annotations

import math

import numpy as np


def softmax_scores(q, k):
    """Scaled scores ``[L, L]`` of one head."""
    return q.astype(np.float64) @ k.astype(np.float64).T / math.sqrt(q.shape[1])


def attend(q, k, v, keep, block):
    """Output ``[L, D]`` and log-sum-exp ``[L]`` of one head over the blocks that are kept."""
    scores = softmax_scores(q, k)
    L = len(q)
    out, lse = np.zeros((L, v.shape[1])), np.full(L, -np.inf)
    for i in range(L):
        seen = [j for j in range(L) if keep[i // block[0], j // block[1]]]
        if not seen:
            continue
        row = scores[i, seen]
        lse[i] = row.max() + math.log(np.exp(row - row.max()).sum())
        out[i] = np.exp(row - lse[i]) @ v[seen].astype(np.float64)
    return out, lse


def weights(q, k, keep, block, lse):
    """W ``[M, N]``: mean over the rows of a block of exp(score - lse), summed over its keys."""
    scores, L = softmax_scores(q, k), len(q)
    M, N = keep.shape
    found = np.zeros((M, N))
    for u in range(M):
        rows = range(u * block[0], min(L, (u + 1) * block[0]))
        for v in range(N):
            if keep[u, v]:
                keys = slice(v * block[1], min(L, (v + 1) * block[1]))
                found[u, v] = np.mean([np.exp(scores[i, keys] - lse[i]).sum() for i in rows])
    return found


def top_p(row, share, among):
    """Blocks of one row, taken from the largest down until they hold the share; the last one in."""
    chosen, held = np.zeros(len(row), bool), 0.0
    ranks = sorted((j for j in range(len(row)) if among[j]), key=lambda j: (-row[j], j))
    total = sum(row[j] for j in ranks)
    for j in ranks:
        if held >= share * total:
            break
        chosen[j] = True
        held += row[j]
    return chosen


def top_k(row, count):
    """The largest of one row."""
    chosen = np.zeros(len(row), bool)
    chosen[sorted(range(len(row)), key=lambda j: (-row[j], j))[:count]] = True
    return chosen


def gsrs(steps, search_steps, shares, inputs, block, reduced=True):
    """One head over a run: outputs and the mask after each step.

    Args:
        inputs: step → (q, k, v), each ``[L, D]``, in the order that blocks are cut in.
    """
    first, keep, outs, masks = None, None, [], []
    for step in range(steps):
        q, k, v = inputs(step)
        M, N = (math.ceil(len(q) / size) for size in block)
        everything = np.ones((M, N), bool)
        if step < search_steps[0]:
            outs.append(attend(q, k, v, everything, block)[0])
        elif step in search_steps:
            among = everything if first is None or not reduced else first
            out, lse = attend(q, k, v, among, block)
            found = weights(q, k, among, block, lse)
            share = shares[search_steps.index(step)]
            keep = np.stack([top_p(found[u], share, among[u]) for u in range(M)])
            first = keep if first is None else first
            outs.append(out)
        else:
            outs.append(attend(q, k, v, keep, block)[0])
        masks.append(keep)
    return outs, masks


def lite_attention(steps, threshold, inputs, block):
    """One head over a run: the mask that each step visits, and its output."""
    masks, outs, keep = [], [], None
    for step in range(steps):
        q, k, v = inputs(step)
        L = len(q)
        M, N = (math.ceil(L / size) for size in block)
        keep = np.ones((M, N), bool) if keep is None else keep
        masks.append(keep)
        outs.append(attend(q, k, v, keep, block)[0])
        scores = softmax_scores(q, k)
        after = np.zeros_like(keep)
        for u in range(M):
            rows = range(u * block[0], min(L, (u + 1) * block[0]))
            running = dict.fromkeys(rows, -np.inf)
            for v_block in reversed(range(N)):
                if not keep[u, v_block]:
                    continue
                tile = slice(v_block * block[1], min(L, (v_block + 1) * block[1]))
                for i in rows:
                    best = scores[i, tile].max()
                    first = running[i] == -np.inf
                    if first or (best - running[i]) * math.log2(math.e) > threshold:
                        after[u, v_block] = True
                    running[i] = max(running[i], best)
        keep = after
    return masks, outs


def diagnose(q, k, away):
    """Mean entropy (nats) and mean distance of one head, from the whole softmax."""
    scores = softmax_scores(q, k)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, 1e-300))).sum(-1)
    return entropy.mean(), (shares * away).sum(-1).mean()
