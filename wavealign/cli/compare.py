"""`wavealign compare`: did this change help?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from wavealign.cli.failure import Command, Failure
from wavealign.cli.options import json_option
from wavealign.cli.output import remark, say, say_json
from wavealign.errors import InputError, unknown_name

if TYPE_CHECKING:
    from wavealign.runs.files import Row

_METRICS = ("time_ms", "hbm_read_bytes", "l2_hit_frac", "energy_j")


@click.command(cls=Command)
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", required=False)
@click.option("--metric", type=click.Choice(_METRICS), default="time_ms", show_default=True,
              help="What to compare.")  # fmt: skip
@click.option("--a-policy", metavar="P", help="Of A, only this policy; pairs may differ in it.")
@click.option("--b-policy", metavar="P", help="Of B (or of A, where no B is given), only this.")
@click.option(
    "--where", "conditions", multiple=True, metavar="FIELD=VALUE",
    help="Only rows like this, e.g. source=measured or kernel=fa4; repeatable.",
)  # fmt: skip
@click.option("--ignore", multiple=True, metavar="FIELD",
              help="A pair may differ in this, e.g. device or seed; repeatable.")  # fmt: skip
@click.option(
    "--by", multiple=True, metavar="FIELD",
    help="Group by mask, policy, device, kernel, regime, heads or seed; repeatable. Default: "
    "the first four, where they vary.",
)  # fmt: skip
@click.option(
    "--fail-over", type=click.FloatRange(0), metavar="X",
    help="Exit 1 where B is worse, beyond noise, by more than X % (points for l2_hit_frac).",
)  # fmt: skip
@json_option
def compare(
    a: str,
    b: str | None,
    metric: str,
    a_policy: str | None,
    b_policy: str | None,
    conditions: tuple[str, ...],
    ignore: tuple[str, ...],
    by: tuple[str, ...],
    fail_over: float | None,
    as_json: bool,
) -> None:
    """Compare the runs of A with those of B, pair by pair.

    A and B are result files, trial files, or folders of a sweep. With --a-policy and --b-policy
    two policies are compared, also inside one file. The first line says what it comes to
    (docs/report.md says how that is decided).
    """
    from wavealign.report import comparison as words
    from wavealign.runs.files import load_rows
    from wavealign.runs.launch import KEY_FIELDS
    from wavealign.runs.metrics import METRICS
    from wavealign.runs.pairing import compare_rows

    if (a_policy is None) != (b_policy is None):
        raise InputError("--a-policy and --b-policy belong together; only one was given.")
    if b is None and a_policy is None:
        raise InputError(
            "one file alone has nothing to be compared with: give a second one, or two policies "
            "of it (--a-policy original --b-policy lockstep)."
        )
    if b is None and a_policy == b_policy:
        raise InputError(f"--a-policy and --b-policy are both '{a_policy}'; name two policies.")
    for kind, names, valid in (("group", by, words.GROUP_FIELDS), ("field", ignore, KEY_FIELDS)):
        for name in names:
            if name not in valid:
                raise unknown_name(kind, name, valid)
    loaded = {path: load_rows([path]) for path in (a, b or a)}
    remark(*(text for found in loaded.values() for text in found.notes))
    rows_a = _chosen(loaded[a].rows, a, conditions, a_policy)
    rows_b = _chosen(loaded[b or a].rows, b or a, conditions, b_policy)
    skipped = (*ignore, "policy", "schedule_file") if a_policy is not None else ignore
    comparison = compare_rows(rows_a, rows_b, METRICS[metric], skipped)
    summary = comparison.summary()
    names = ("A", "B") if a_policy is None or b_policy is None else (a_policy, b_policy)
    verdict = words.judge(comparison, names)
    fields = list(by) or words.default_groups(comparison)
    if as_json:
        for record in words.records(comparison, fields, verdict):
            say_json(record)
    else:
        from wavealign.report.tables import print_table

        say(verdict.text, "")
        for name, path, rows, alone, policy in (
            ("A", a, rows_a, comparison.only_a, a_policy),
            ("B", b or a, rows_b, comparison.only_b, b_policy),
        ):
            what = f"{path}, policy {policy}" if policy else path
            say(f"{name}      {what}: {len(rows)} rows, {len(alone)} without a partner")
        if comparison.unusable:
            say(f"{comparison.unusable} more pairs have no usable {metric}.")
        say(words.noise_line(comparison, summary))
        if summary.by_mask:
            say("CI     over masks: policies of one mask tend to differ together")
        for name, (in_a, in_b) in comparison.differs.items():
            say(f"{name}: {in_a} in A, {in_b} in B")
        if fields:
            say("")
            print_table(words.groups_table(comparison, fields))
        say("", *words.extremes(comparison))
    if fail_over is not None and verdict.outcome == "worse":
        worse = abs(METRICS[metric].told(summary.mean))
        if worse > fail_over:
            raise Failure(f"B is worse than A by {worse:.2f}, over --fail-over {fail_over:g}.", 1)


def _chosen(
    rows: list[Row], path: str, conditions: tuple[str, ...], policy: str | None
) -> list[Row]:
    """The rows that meet every condition.

    Raises:
        InputError: a condition that can't be read, or that no row meets.
    """
    from wavealign.runs.result import FIELDS

    wanted = [] if policy is None else [("policy", policy)]
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals:
            raise InputError(f"--where '{condition}': expected FIELD=VALUE, e.g. kernel=fa4.")
        if name not in FIELDS:
            raise unknown_name("field in --where", name, list(FIELDS))
        wanted.append((name, value))
    for name, value in wanted:
        found = [row for row in rows if str(getattr(row.result, name)) == value]
        if rows and not found:
            values = sorted({str(getattr(row.result, name)) for row in rows})
            raise InputError(f"{path}: {unknown_name(name, value, values)}")
        rows = found
    if not rows:
        raise InputError(f"{path}: holds no runs (only failed trials).")
    return rows
