"""The registry: every name that a policy may use, with its parameters, cost and source."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from wavealign.masks.block_mask import HeadMask, Int32Array
from wavealign.order import row_orders
from wavealign.order.context import OrderContext
from wavealign.order.parameters import Parameter

RowOrder = Callable[..., Int32Array]
"""``(head, context, **parameters)`` → int32 ``(M,)``, slot in launch order → query block.

The parameters are those of its entry, wave and seed left out: the context says them.
"""

PAPER = "WaveAlign: Cache-Aware Query-Row Scheduling for Sparse Attention in Long-Video Generation"


@dataclass(frozen=True)
class Entry:
    """One documented name of the registry.

    Attributes:
        name: as written in a policy.
        kind: ``"rows"``, ``"visits"`` or ``"alias"``.
        formula: what it computes.
        cost: per head, in M rows, N K/V blocks, Z kept blocks, W rows in flight, r coordinates.
        source: where it comes from.
        seeded: whether chance is involved.
        parameters: what can be set, ``NAME(parameter=value,...)``; those of an alias are its
            parts'.
        extra: the extra of this package that it needs, or None.
    """

    name: str
    kind: str
    formula: str
    cost: str
    source: str
    seeded: bool = False
    parameters: tuple[Parameter, ...] = ()
    extra: str | None = None


def _lazy(module: str, name: str) -> RowOrder:
    """A row order whose module (scipy) is imported when it first runs."""

    def order(head: HeadMask, context: OrderContext, **parameters: object) -> Int32Array:
        function: RowOrder = getattr(importlib.import_module(f"wavealign.order.{module}"), name)
        return function(head, context, **parameters)

    return order


WAVE = Parameter("wave", "int", None, "rows in a wave; default: the launch's W", 1)
_SEED = Parameter("seed", "int", None, "of the random choice; default: the launch's seed", 0)
_RANK = Parameter(
    "rank", "int", 1, "coordinates; beyond 1, rows go along the Hilbert curve through them", 1, 8
)
_SIGN = Parameter(
    "sign", "choice", "long", "the end of the coordinate to begin at: long rows or short ones",
    choices=("long", "short"),
)  # fmt: skip
_SPAN = Parameter(
    "span", "float", row_orders.DEALT_SPAN_FRAC,
    "share of NNZ that a group of waves, and each of its waves, spans", 0, 1,
)  # fmt: skip
_EMBEDDING = Parameter("rank", "int", 8, "coordinates of a row, σ1·u1 to σr·ur", 1, 64)
_NEIGHBOURS = Parameter("neighbours", "int", 10, "nearest rows that a row is joined to", 1, 1000)


def _rows(
    function: RowOrder, name: str, formula: str, cost: str, source: str,
    *parameters: Parameter, extra: str | None = None,
) -> tuple[RowOrder, Entry]:  # fmt: skip
    seeded = _SEED in parameters
    return function, Entry(name, "rows", formula, cost, source, seeded, parameters, extra)


ROWS: dict[str, tuple[RowOrder, Entry]] = {
    entry.name: (function, entry)
    for function, entry in (
        _rows(
            row_orders.original, "original",
            "query blocks as they come", "M", "what kernels do today",
        ),
        _rows(
            row_orders.random, "random",
            "a random permutation per head", "M", "the floor to compare with", _SEED,
        ),
        _rows(
            _lazy("spectra", "svd"), "svd",
            "sort by σ1·u1 of the column-centred mask, from the end where NNZ is large",
            "~40-200 passes over Z (ARPACK), M log M", f"{PAPER}, section IV-C (stage 1)",
            _RANK, _SIGN,
        ),
        _rows(
            row_orders.nnz, "nnz", "NNZ descending over the whole head", "M log M",
            "longest-processing-time list scheduling (Graham 1969)",
        ),
        _rows(
            row_orders.nnz_dealt, "nnz-dealt",
            "NNZ descending, rows dealt out so that every wave spans 8 % of NNZ",
            "M log M", "WaveAlign project, docs/policies.md", _SPAN, WAVE,
        ),
        _rows(
            _lazy("spectra", "nnz_bucket_svd"), "nnz-bucket+svd",
            "NNZ descending, cut into buckets of 2 waves, svd order of its rows inside each",
            "as svd, bucket by bucket", "WaveAlign project, docs/policies.md",
            # Two did best or nearly so on content masks.
            Parameter("bucket", "int", 2, "waves in a bucket", 1), _RANK, _SIGN, WAVE,
        ),
        _rows(
            _lazy("spectra", "spectral"), "spectral",
            "sort by the Fiedler vector of the row-overlap graph, (D - BBᵀ)y = λDy",
            "~40-200 passes over Z (ARPACK), M log M",
            "Shi & Malik 2000; spectral seriation, Atkins et al. 1998",
        ),
        _rows(
            row_orders.greedy, "greedy",
            "next row = largest summed Jaccard overlap with the W rows placed last",
            "M²·N/64 word operations", "Gorder (Wei et al. 2016) with the wave as its window", WAVE,
        ),
        _rows(
            row_orders.wave_pack, "wave-pack",
            "each wave: the longest row left, then the largest summed Jaccard overlap with it",
            "M²·N/128 word operations",
            "greedy packing into bins of W rows; WaveAlign project, docs/orders.md", WAVE,
        ),
        _rows(
            _lazy("bisection", "pd_bisect"), "pd-bisect",
            "halve the rows across the principal direction of their svd coordinates, to waves",
            "as svd with r vectors, M·r² log(M/W)",
            "principal direction divisive partitioning, Boley 1998", _EMBEDDING, WAVE,
        ),
        _rows(
            _lazy("bisection", "profile_bisect"), "profile-bisect",
            "as pd-bisect, on the cumulative profile: a row's blocks in the first K/V parts",
            "Z, M·b² log(M/W) for b bins",
            "Boley 1998 on cumulative profiles; WaveAlign project, docs/orders.md",
            Parameter("bins", "int", 16, "parts of the K/V axis in a profile", 1, 256), WAVE,
        ),
        _rows(
            _lazy("bisection", "kmeans"), "kmeans",
            "balanced k-means on svd coordinates: clusters of W rows, longest first",
            "as pd-bisect, and 10 rounds of M²/W·(r + log M)",
            "Lloyd 1982; balanced clusters, Malinen & Fränti 2014",
            _EMBEDDING, Parameter("rounds", "int", 10, "rounds at most", 1, 1000), WAVE,
        ),
        _rows(
            _lazy("graphs", "rcm"), "rcm",
            "reverse Cuthill-McKee order of the rows' nearest-neighbour graph",
            "as svd with r vectors, M·k log M for k neighbours", "Cuthill & McKee 1969, by scipy",
            _NEIGHBOURS, _EMBEDDING,
        ),
        _rows(
            _lazy("bisection", "graph_bisect"), "graph-bisect",
            "halve the rows and swap pairs while Σ d·log(n/(d+1)) falls, to waves",
            "20 rounds of Z, log(M/W) times", "recursive graph bisection, Dhulipala et al. 2016",
            Parameter("rounds", "int", 20, "rounds of swaps at most, per part", 1, 1000), WAVE,
        ),
        _rows(
            _lazy("graphs", "metis"), "metis",
            "cut the rows' nearest-neighbour graph into M/W parts, longest first",
            "as svd with r vectors, M·k log(M/W) for k neighbours",
            "multilevel recursive bisection, Karypis & Kumar 1998, by METIS",
            _NEIGHBOURS, _EMBEDDING, _SEED, WAVE, extra="orders",
        ),
    )
}  # fmt: skip

VISITS = {
    entry.name: entry
    for entry in (
        Entry("ascending", "visits", "K/V blocks in index order", "none", "what kernels do today"),
        Entry(
            "shuffled", "visits",
            "one random permutation of the K/V blocks per head, shared by its rows",
            "Z + M·N", "WaveAlign project, docs/policies.md", True, (_SEED,),
        ),
        Entry(
            "sawtooth", "visits", "rows in odd waves walk their list backwards", "Z",
            "sawtooth wavefront reordering, https://arxiv.org/abs/2601.16032", parameters=(WAVE,),
        ),
        Entry(
            "phased", "visits",
            "a row starts at the mean place of the rows in flight, and wraps around", "M·W + Z",
            "circular shared scans of databases; WaveAlign project, docs/policies.md",
            parameters=(WAVE,),
        ),
    )
}  # fmt: skip

SUFFIX = Entry(
    "+nnz", "rows",
    "suffix of any row order: cut it into waves of W slots, NNZ descending inside each",
    "M log W", f"{PAPER}, section IV-D (stage 2)", parameters=(WAVE,),
)  # fmt: skip

ALIASES = {
    "nnz-wave": ("original+nnz", "stage 2 of the paper alone"),
    "lockstep": ("nnz/shuffled+phased", "rows in flight at the same place of their pass"),
    "resync": ("nnz-dealt/shuffled+phased", "lockstep that SMs of unequal speed can't undo"),
}


def row_parameters(base: str, nnz_inside_waves: bool) -> tuple[Parameter, ...]:
    """Parameters of a row order, and of the suffix where it has one."""
    own = ROWS[base][1].parameters
    return own if not nnz_inside_waves or WAVE in own else (*own, WAVE)


def visit_parameters(names: list[str]) -> tuple[Parameter, ...]:
    """Parameters of visit orders that are joined."""
    return tuple(dict.fromkeys(p for name in names for p in VISITS[name].parameters))


def split_rows(name: str) -> tuple[str, bool] | None:
    """A row order's name → its entry's, and whether waves are sorted; None if it is no name."""
    if name in ROWS:
        return name, False
    base = name.removesuffix("+nnz")
    return (base, True) if base != name and base in ROWS else None
