"""Row orders, visit orders, and the policies that combine them into schedules."""

from wavealign.order.policies import (
    DEFAULT_POLICIES,
    Policy,
    build_schedule,
    parse_policy,
    registry,
)
from wavealign.order.schedule import Schedule

__all__ = ["DEFAULT_POLICIES", "Policy", "Schedule", "build_schedule", "parse_policy", "registry"]
