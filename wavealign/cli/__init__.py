"""The command line: parse, call, print. stdout is data, stderr is progress.

Exit codes: 0 done; 1 the work failed or was interrupted; 2 bad usage or input; 3 a missing
capability. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import click

from wavealign._version import __version__
from wavealign.cli.calibrate import calibrate
from wavealign.cli.capture import capture
from wavealign.cli.compare import compare
from wavealign.cli.curve import curve
from wavealign.cli.diagnose import diagnose
from wavealign.cli.doctor import doctor
from wavealign.cli.failure import Group
from wavealign.cli.guard import guard
from wavealign.cli.lists import devices, methods, policies
from wavealign.cli.mask import mask
from wavealign.cli.order import order
from wavealign.cli.report import report
from wavealign.cli.sim import sim
from wavealign.cli.sweep import sweep
from wavealign.cli.validate import validate


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="wavealign")
def main() -> None:
    """Order the rows of block-sparse attention so that what runs together reads together."""


for command in (
    sim, sweep, curve, order, validate, calibrate, guard, mask, capture, diagnose, policies,
    methods, devices, doctor, compare, report,
):  # fmt: skip
    main.add_command(command)
