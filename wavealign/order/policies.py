"""The policy registry: names, what they mean, what they cost, and how they become schedules."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from wavealign.errors import InputError, unknown_name
from wavealign.masks.block_mask import BlockMask, HeadMask, Int32Array
from wavealign.order import rows
from wavealign.order.context import OrderContext
from wavealign.order.schedule import Schedule
from wavealign.order.visits import VisitOrder, fill_lists, phase_lists

RowOrder = Callable[[HeadMask, OrderContext], Int32Array]

PAPER = "WaveAlign: Cache-Aware Query-Row Scheduling for Sparse Attention in Long-Video Generation"


@dataclass(frozen=True)
class Entry:
    """One documented name of the registry.

    Attributes:
        name: as written in a policy.
        kind: ``"rows"``, ``"visits"`` or ``"alias"``.
        formula: what it computes.
        cost: per head, in M rows, N K/V blocks, Z kept blocks, W rows in flight.
        source: where it comes from.
        seeded: whether chance is involved.
    """

    name: str
    kind: str
    formula: str
    cost: str
    source: str
    seeded: bool = False


@dataclass(frozen=True)
class Policy:
    """A parsed policy: a row order, whether waves are sorted by NNZ, and a visit order."""

    name: str
    rows: RowOrder
    nnz_inside_waves: bool
    visits: VisitOrder


def _lazy(module_function: str) -> RowOrder:
    """A row order whose module (scipy) is imported when it first runs."""

    def order(head: HeadMask, context: OrderContext) -> Int32Array:
        from wavealign.order import spectra

        function: RowOrder = getattr(spectra, module_function)
        return function(head, context)

    return order


_ROWS: dict[str, tuple[RowOrder, Entry]] = {
    entry.name: (function, entry)
    for function, entry in (
        (
            rows.original,
            Entry("original", "rows", "query blocks as they come", "M", "what kernels do today"),
        ),
        (
            rows.random,
            Entry(
                "random",
                "rows",
                "a random permutation per head",
                "M",
                "the floor to compare with",
                True,
            ),
        ),
        (
            _lazy("svd"),
            Entry(
                "svd",
                "rows",
                "sort by σ1·u1 of the column-centred mask, from the end where NNZ is large",
                "~40-200 passes over Z (ARPACK), M log M",
                f"{PAPER}, section IV-C (stage 1)",
            ),
        ),
        (
            rows.nnz,
            Entry(
                "nnz",
                "rows",
                "NNZ descending over the whole head",
                "M log M",
                "longest-processing-time list scheduling (Graham 1969)",
            ),
        ),
        (
            rows.nnz_dealt,
            Entry(
                "nnz-dealt",
                "rows",
                "NNZ descending, rows dealt out so that every wave spans 8 % of NNZ",
                "M log M",
                "WaveAlign project, docs/policies.md",
            ),
        ),
        (
            _lazy("nnz_bucket_svd"),
            Entry(
                "nnz-bucket+svd",
                "rows",
                "NNZ descending, cut into buckets of 2 waves, svd order of its rows inside each",
                "as svd, bucket by bucket",
                "WaveAlign project, docs/policies.md",
            ),
        ),
        (
            _lazy("spectral"),
            Entry(
                "spectral",
                "rows",
                "sort by the Fiedler vector of the row-overlap graph, (D - BBᵀ)y = λDy",
                "~40-200 passes over Z (ARPACK), M log M",
                "Shi & Malik 2000; spectral seriation, Atkins et al. 1998",
            ),
        ),
        (
            rows.greedy,
            Entry(
                "greedy",
                "rows",
                "next row = largest summed Jaccard overlap with the W rows placed last",
                "M²·N/64 word operations",
                "Gorder (Wei et al. 2016) with the wave as its window",
            ),
        ),
    )
}

_VISITS: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("ascending", "visits", "K/V blocks in index order", "none", "what kernels do today"),
        Entry(
            "shuffled",
            "visits",
            "one random permutation of the K/V blocks per head, shared by its rows",
            "Z + M·N",
            "WaveAlign project, docs/policies.md",
            True,
        ),
        Entry(
            "sawtooth",
            "visits",
            "rows in odd waves walk their list backwards",
            "Z",
            "sawtooth wavefront reordering, https://arxiv.org/abs/2601.16032",
        ),
        Entry(
            "phased",
            "visits",
            "a row starts at the mean place of the rows in flight, and wraps around",
            "M·W + Z",
            "circular shared scans of databases; WaveAlign project, docs/policies.md",
        ),
    )
}

_SUFFIX = Entry(
    "+nnz",
    "rows",
    "suffix of any row order: cut it into waves of W slots, NNZ descending inside each",
    "M log W",
    f"{PAPER}, section IV-D (stage 2)",
)

_ALIASES = {
    "nnz-wave": ("original+nnz", "stage 2 of the paper alone"),
    "lockstep": ("nnz/shuffled+phased", "rows in flight at the same place of one sweep"),
    "resync": ("nnz-dealt/shuffled+phased", "lockstep that SMs of unequal speed can't undo"),
}

DEFAULT_POLICIES = (
    "original",
    "random",
    "svd",
    "nnz-wave",
    "svd+nnz",
    "spectral+nnz",
    "greedy+nnz",
    "nnz",
    "lockstep",
    "resync",
)
"""What `wavealign sim` compares when no policy is named."""


def registry() -> list[Entry]:
    """Every documented name: row orders, the suffix, visit orders, aliases."""
    return [
        *(entry for _, entry in _ROWS.values()),
        _SUFFIX,
        *_VISITS.values(),
        *(
            Entry(name, "alias", f"= {target}", "as there", why)
            for name, (target, why) in _ALIASES.items()
        ),
    ]


def policy_names() -> list[str]:
    """Names that stand alone: row orders, their usual ``+nnz`` forms, aliases."""
    return [*_ROWS, "svd+nnz", "spectral+nnz", "greedy+nnz", *_ALIASES]


def parse_policy(text: str) -> Policy:
    """A policy from ``ROWS[/VISITS]``, e.g. ``"svd+nnz"`` or ``"nnz/shuffled+sawtooth"``.

    Raises:
        InputError: unknown names (with the nearest match), or visit orders that exclude each
            other.
    """
    name = text.strip()
    row_text, slash, visit_text = name.partition("/")
    expanded = _ALIASES.get(row_text, (row_text, ""))[0]
    row_name, _, alias_visits = expanded.partition("/")
    if alias_visits and slash:
        raise InputError(
            f"policy '{name}': '{row_text}' already means '{expanded}'; write the row order out "
            "to combine it with other visits."
        )
    sort_waves = row_name not in _ROWS and row_name.endswith("+nnz")
    base = row_name.removesuffix("+nnz") if sort_waves else row_name
    if base not in _ROWS:
        raise unknown_name("policy", row_text, policy_names())
    return Policy(
        name,
        _ROWS[base][0],
        sort_waves,
        _parse_visits(visit_text if slash else alias_visits or "ascending", name),
    )


def _parse_visits(text: str, policy: str) -> VisitOrder:
    parts = text.split("+")
    for part in parts:
        if part not in _VISITS:
            raise unknown_name(f"visit order in policy '{policy}':", part, _VISITS)
    for a, b, why in (
        ("ascending", "shuffled", "a sweep has one order"),
        ("sawtooth", "phased", "a row that joins the sweep of the others can't walk against it"),
    ):
        if a in parts and b in parts:
            raise InputError(f"policy '{policy}': {a} and {b} exclude each other: {why}.")
    if len(set(parts)) != len(parts):
        raise InputError(f"policy '{policy}': a visit order is named twice.")
    return VisitOrder("shuffled" in parts, "sawtooth" in parts, "phased" in parts)


def build_schedule(
    mask: BlockMask, policy: str | Policy, wave: int, seed: int = 0, jobs: int = 1
) -> Schedule:
    """The schedule that a policy makes of a mask, heads in order.

    Args:
        mask: the mask of one launch.
        policy: a name (see `parse_policy`) or a parsed policy.
        wave: rows in flight at once, W.
        seed: of every random choice; head `h` draws from its own stream.
        jobs: threads; the result doesn't depend on it.

    Raises:
        InputError: an unknown policy, or `wave` < 1.
    """
    recipe = policy if isinstance(policy, Policy) else parse_policy(policy)
    if wave < 1:
        raise InputError(f"wave is {wave}; expected at least one row in flight.")
    visits = recipe.visits
    row_order = np.empty((mask.H, mask.M), dtype=np.int32)
    # Ascending lists are the mask's own: no copy of what may be half a gigabyte.
    own = visits.shuffled or visits.sawtooth or visits.phased
    lists = np.empty_like(mask.indices) if own else mask.indices

    def one_head(h: int) -> None:
        head = mask.head(h)
        context = OrderContext(wave, seed, h)
        order = recipe.rows(head, context)
        if recipe.nnz_inside_waves:
            order = rows.nnz_inside_waves(order, head, wave)
        row_order[h] = order
        if own:
            first = mask.indptr[h * mask.M]
            fill_lists(lists[first : first + len(head.indices)], head, order, visits, context)

    with ThreadPoolExecutor(max(1, min(jobs, mask.H))) as pool:
        list(pool.map(one_head, range(mask.H)))
    if visits.phased:
        phase_lists(mask, row_order, lists, visits, wave, seed)
    return Schedule(row_order, mask.indptr, lists, mask.shape, recipe.name)
