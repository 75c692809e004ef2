"""`wavealign doctor`: what this machine has of what measuring needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from wavealign.cli.failure import Command
from wavealign.cli.output import say_json

if TYPE_CHECKING:
    from wavealign.gpu.backend import Backend
    from wavealign.gpu.registry import Refused

DOCTOR_SCHEMA = "wavealign.doctor/1"


@click.command(cls=Command)
@click.option("--probe", is_flag=True, help="Profile a small kernel: may counters be read?")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor(probe: bool, as_json: bool) -> None:
    """GPU, driver, packages, profiler and backends: what is there and what is missing.

    A report: what is missing is no failure.
    """
    from wavealign.gpu.doctor import diagnose

    checks = diagnose(_backends(), probe)
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        say_json({"schema": DOCTOR_SCHEMA, "checks": rows})
        return
    from wavealign.report.gpu_tables import doctor_table
    from wavealign.report.tables import print_table

    print_table(doctor_table(checks))


def _backends() -> Iterator[Backend | Refused]:
    """Looked up when `diagnose` gets there, so that a missing torch is one of its findings."""
    from wavealign.gpu.registry import backends

    yield from backends()
