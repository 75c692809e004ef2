"""Policies: a string becomes a recipe, and a recipe makes a schedule of a mask."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from wavealign.errors import InputError, unknown_name
from wavealign.masks.block_mask import BlockMask, HeadMask, Int32Array, need_block_mask
from wavealign.order import row_orders
from wavealign.order.context import OrderContext
from wavealign.order.parameters import (
    Parameter,
    Value,
    Values,
    bind,
    format_arguments,
    split_arguments,
)
from wavealign.order.registry import (
    ALIASES,
    ROWS,
    SUFFIX,
    VISITS,
    Entry,
    RowOrder,
    row_parameters,
    split_rows,
    visit_parameters,
)
from wavealign.order.schedule import Schedule
from wavealign.order.visits import VisitOrder, fill_lists, phase_lists, turn_lists

DEFAULT_POLICIES = (
    "original", "random", "svd", "nnz-wave", "svd+nnz", "spectral+nnz", "greedy+nnz", "nnz",
    "lockstep", "resync",
)  # fmt: skip
"""What `wavealign sim` compares when no policy is named."""


@dataclass(frozen=True)
class Policy:
    """A parsed policy.

    Attributes:
        name: as written, parameters sorted and only those that differ from their defaults.
        base: the row order's name in the registry.
        rows: the row order.
        nnz_inside_waves: whether waves are sorted by NNZ.
        visits: the visit order.
        row_parameters: those of the row order and the suffix that differ from the defaults.
        visit_parameters: those of the visit order.
    """

    name: str
    base: str
    rows: RowOrder
    nnz_inside_waves: bool
    visits: VisitOrder
    row_parameters: Values = field(default_factory=dict)
    visit_parameters: Values = field(default_factory=dict)

    def row_order(self, head: HeadMask, context: OrderContext) -> Int32Array:
        """The row order of one head: slot in launch order → query block, int32 ``(M,)``."""
        given = self.row_parameters
        context = context.replaced(_whole(given, "wave"), _whole(given, "seed"))
        own = {
            parameter.name: given.get(parameter.name, parameter.default)
            for parameter in ROWS[self.base][1].parameters
            if parameter.name not in ("wave", "seed")
        }
        order = self.rows(head, context, **own)
        if self.nnz_inside_waves:
            order = row_orders.nnz_inside_waves(order, head, context.wave)
        return order


def registry() -> list[Entry]:
    """Every documented name: row orders, the suffix, visit orders, aliases."""
    aliases = []
    for name, (target, why) in ALIASES.items():
        policy = parse_policy(target)
        own = row_parameters(policy.base, policy.nnz_inside_waves)
        own += visit_parameters(_visit_names(target.partition("/")[2] or "ascending"))
        seeded = ROWS[policy.base][1].seeded or policy.visits.shuffled
        own = tuple(dict.fromkeys(own))
        aliases.append(Entry(name, "alias", f"= {target}", "as there", why, seeded, own))
    return [*(entry for _, entry in ROWS.values()), SUFFIX, *VISITS.values(), *aliases]


def policy_names() -> list[str]:
    """Names that stand alone: row orders, their usual ``+nnz`` forms, aliases."""
    return [*ROWS, "svd+nnz", "spectral+nnz", "greedy+nnz", *ALIASES]


def parse_policy(text: str) -> Policy:
    """A policy from ``ROWS[(name=value,...)][/VISITS[(name=value,...)]]``.

    E.g. ``"svd+nnz"``, ``"nnz/shuffled+sawtooth"``, ``"svd+nnz(rank=4,wave=132)"``,
    ``"nnz-dealt(span=0.06)/shuffled+phased(seed=3)"``. Parameters of an alias go to those of its
    parts that have them.

    Raises:
        InputError: unknown names (with the nearest match), visit orders that exclude each
            other, or parameters that can't be used (see `wavealign.order.parameters`).
    """
    whole = text.strip()
    row_text, slash, visit_text = whole.partition("/")
    row_name, row_arguments = split_arguments(row_text, whole)
    visit_name, visit_arguments = split_arguments(visit_text, whole)
    expanded = ALIASES.get(row_name, (row_name, ""))[0]
    own_name, _, alias_visits = expanded.partition("/")
    if alias_visits and slash:
        raise InputError(
            f"policy '{whole}': '{row_name}' already means '{expanded}'; write the row order out "
            "to combine it with other visits."
        )
    found = split_rows(own_name)
    if found is None:
        raise unknown_name("policy", row_name, policy_names())
    base, sort_waves = found
    names = _visit_names(visit_name if slash else alias_visits or "ascending", whole)
    of_rows, of_visits = row_parameters(base, sort_waves), visit_parameters(names)
    if alias_visits:
        both = tuple(dict.fromkeys(of_rows + of_visits))
        given = bind(row_arguments, both, row_name, whole)
        row_values, visit_values = _those(given, of_rows), _those(given, of_visits)
        name = row_name + format_arguments(given)
    else:
        row_values = bind(row_arguments, of_rows, row_name, whole)
        visit_values = bind(visit_arguments, of_visits, visit_name, whole)
        name = row_name + format_arguments(row_values)
        name += slash + visit_name + format_arguments(visit_values)
    visits = VisitOrder(
        "shuffled" in names, "sawtooth" in names, "phased" in names,
        seed=_whole(visit_values, "seed"), wave=_whole(visit_values, "wave"),
    )  # fmt: skip
    return Policy(name, base, ROWS[base][0], sort_waves, visits, row_values, visit_values)


def _those(values: Values, parameters: tuple[Parameter, ...]) -> dict[str, Value]:
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in values.items() if name in names}


def _whole(values: Values, name: str) -> int | None:
    return int(values[name]) if name in values else None


def _visit_names(text: str, policy: str = "") -> list[str]:
    parts = text.split("+")
    for part in parts:
        if part not in VISITS:
            raise unknown_name(f"visit order in policy '{policy}':", part, VISITS)
    for a, b, why in (
        ("ascending", "shuffled", "a head has one K/V order"),
        ("sawtooth", "phased", "a row that joins the pass of the others can't walk against it"),
    ):
        if a in parts and b in parts:
            raise InputError(f"policy '{policy}': {a} and {b} exclude each other: {why}.")
    if len(set(parts)) != len(parts):
        raise InputError(f"policy '{policy}': a visit order is named twice.")
    return parts


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
        MissingCapabilityError: a row order that needs an extra which isn't installed.

    Example:
        >>> import numpy as np
        >>> import wavealign as wa
        >>> mask = wa.BlockMask.from_dense(np.tri(4))
        >>> schedule = wa.build_schedule(mask, "nnz/sawtooth", wave=2)
        >>> schedule.row_order.tolist()  # slot in launch order → query block
        [[3, 2, 1, 0]]
        >>> schedule.head_lists(0).indices.tolist()  # rows 0 and 1 run in the odd wave: backwards
        [0, 1, 0, 0, 1, 2, 0, 1, 2, 3]
    """
    need_block_mask(mask)
    recipe = policy if isinstance(policy, Policy) else parse_policy(policy)
    if wave < 1:
        raise InputError(f"wave is {wave}; expected at least one row in flight.")
    row_order = np.empty((mask.H, mask.M), dtype=np.int32)

    def one_head(h: int) -> None:
        row_order[h] = recipe.row_order(mask.head(h), OrderContext(wave, seed, h))

    _each_head(one_head, mask.H, jobs)
    lists = visiting_lists(mask, row_order, recipe.visits, wave, seed, jobs)
    return Schedule(row_order, mask.indptr, lists, mask.shape, recipe.name)


def visiting_lists(
    mask: BlockMask, row_order: Int32Array, visits: VisitOrder, wave: int, seed: int = 0,
    jobs: int = 1, *, first_head: int = 0, unturned: Int32Array | None = None,
) -> Int32Array:  # fmt: skip
    """Every row's K/V blocks in visiting order, for rows that run in this order.

    Args:
        mask: the mask of one launch.
        row_order: int32 ``(H, M)``, slot → query block.
        visits: how rows walk their lists.
        wave, seed, jobs: as for `build_schedule`.
        first_head: position of the mask's first head in the launch that the seed is for.
        unturned: the same lists of any other row order of this mask, made with neither `sawtooth`
            nor `phased`: saves making them again.

    Returns:
        int32 ``(nnz,)``, rows as in ``mask.indptr``; the mask's own array, or `unturned`, where
        nothing else moves.
    """
    if unturned is None and not visits.shuffled:
        unturned = mask.indices
    depends_on_rows = visits.sawtooth or visits.phased
    if unturned is not None and not depends_on_rows:
        return unturned  # no copy of what may be half a gigabyte
    lists = np.empty_like(mask.indices) if unturned is None else unturned.copy()

    def one_head(h: int) -> None:
        head, first = mask.head(h), mask.indptr[h * mask.M]
        part = lists[first : first + len(head.indices)]
        context = OrderContext(wave, seed, first_head + h)
        if unturned is None:
            fill_lists(part, head, visits, context)
        turn_lists(part, head, row_order[h], visits, context)

    _each_head(one_head, mask.H, jobs)
    if visits.phased:
        phase_lists(mask, row_order, lists, visits, wave, seed, first_head)
    return lists


def _each_head(do: Callable[[int], None], heads: int, jobs: int) -> None:
    with ThreadPoolExecutor(max(1, min(jobs, heads))) as pool:
        list(pool.map(do, range(heads)))
