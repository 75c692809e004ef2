"""What each head is planned by: policy names resolved to what the device does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavealign.errors import InputError
from wavealign.order.policies import parse_policy
from wavealign.order.visits import VisitOrder
from wavealign.planning.row_orders import ROW_ORDERS

_NAMES = {"nnz-wave": "original+nnz", "lockstep": "nnz", "resync": "nnz-dealt"}


@dataclass(frozen=True)
class Recipe:
    """A policy as the device makes it.

    Attributes:
        name: the policy, as written.
        rows: one of `ROW_ORDERS`.
        inside_waves: whether waves are sorted by NNZ.
        visits: how rows walk their lists.
    """

    name: str
    rows: str
    inside_waves: bool
    visits: VisitOrder

    @classmethod
    def parse(cls, name: str) -> Recipe:
        """From a policy's name.

        Raises:
            InputError: an unknown policy, or one that only the numpy code makes: another row
                order, or parameters that aren't the defaults.
        """
        policy = parse_policy(name)
        if policy.row_parameters or policy.visit_parameters:
            raise InputError(
                f"policy '{policy.name}': parameters aren't planned on a device, only their "
                "defaults (wavealign.build_schedule makes the others)."
            )
        text = policy.name.partition("/")[0]
        text = _NAMES.get(text, text)
        rows = text.removesuffix("+nnz") if policy.nnz_inside_waves else text
        if rows not in ROW_ORDERS:
            raise InputError(
                f"policy '{name}': '{rows}' isn't planned on a device; valid row orders there: "
                f"{', '.join(ROW_ORDERS)}, each also with +nnz (wavealign.build_schedule has the "
                "others)."
            )
        return cls(policy.name, rows, policy.nnz_inside_waves, policy.visits)


def recipes_per_head(policies: str | Sequence[str], heads: int) -> tuple[Recipe, ...]:
    """One recipe a head.

    Raises:
        InputError: another number of policies than heads, or an unusable one.
    """
    if isinstance(policies, str):
        return (Recipe.parse(policies),) * heads
    if len(policies) != heads:
        raise InputError(f"{len(policies)} policies for {heads} heads; expected one each.")
    parsed = {name: Recipe.parse(name) for name in dict.fromkeys(policies)}
    return tuple(parsed[name] for name in policies)
