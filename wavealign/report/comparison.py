"""`wavealign compare` for people and for programs: the verdict, the tables, the records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.table import Table

from wavealign.report.tables import table_frame
from wavealign.runs.metrics import Metric
from wavealign.runs.pairing import Comparison, PairedValue, Summary

COMPARE_SCHEMA = "wavealign.compare/1"
GROUP_FIELDS = ("mask", "policy", "device", "kernel", "regime", "heads", "seed")


@dataclass(frozen=True)
class Verdict:
    """What a comparison comes to.

    Attributes:
        outcome: ``"better"`` or ``"worse"`` (B than A), ``"equal"``, ``"within noise"``,
            ``"unclear"`` (the interval holds no difference) or ``"unproven"`` (a single pair whose
            noise isn't known).
        text: a sentence.
    """

    outcome: str
    text: str


def judge(comparison: Comparison, names: tuple[str, str] = ("A", "B")) -> Verdict:
    """The verdict on B against A (docs/report.md, "How compare decides")."""
    metric, summary = comparison.metric, comparison.summary()
    a, b = names
    count = f"{summary.count} pair{'s' if summary.count != 1 else ''}"
    change = f"{metric.title} {signed(summary.mean, metric)}"
    if summary.low is not None and summary.high is not None:
        change += f" (95 % CI {interval(summary, metric)})"
    outcome = outcome_of(comparison, summary)
    if outcome == "equal":
        return Verdict(outcome, f"no difference: {metric.title} is equal in {count}.")
    if outcome == "within noise":
        floor = amount(summary.noise_floor or 0.0, metric)
        return Verdict(
            outcome, f"no difference beyond noise: {change}, {count}; the noise floor is {floor}."
        )
    up, down = summary.larger, summary.smaller
    wins, losses = (up, down) if metric.more_is_better else (down, up)
    if outcome == "unclear":
        return Verdict(
            outcome,
            f"no clear difference: {change}, {count}; {b} is better in {wins}, worse in {losses}.",
        )
    better = (summary.mean > 0) == metric.more_is_better
    form = metric.better if better else metric.worse
    # "faster" compares speeds, A's time over B's; everything else is a share of A.
    inverted = metric.name == "time_ms" and better
    text = (
        f"{b} {form.format(amount(-summary.mean if inverted else summary.mean, metric))} than {a}"
    )
    inside = count
    if summary.low is not None and summary.high is not None:
        if summary.low <= 0 <= summary.high:
            inside = (
                f"{count}, none the other way beyond noise; they differ too much for a 95 % CI of "
                f"{metric.title} without 0: {interval(summary, metric)}"
            )
        else:
            inside = f"95 % CI {_amounts(summary, metric, inverted)}, {count}"
    if outcome == "unproven":
        return Verdict(outcome, f"{text} ({inside}); nothing says how much of that is noise.")
    return Verdict(outcome, f"{text} ({inside}).")


def outcome_of(comparison: Comparison, summary: Summary) -> str:
    """The outcome of all pairs, or of some (see `Verdict`)."""
    metric = comparison.metric
    if summary.larger == summary.smaller == 0:
        return "equal"
    if summary.noise_floor is not None and abs(summary.mean) <= summary.noise_floor:
        return "within noise"
    if summary.low is None or summary.high is None:
        if summary.noise_floor is None:
            return "unproven"
    elif summary.low <= 0 <= summary.high:
        against = summary.beyond and summary.beyond[0 if summary.mean < 0 else 1]
        if not comparison.noise_whole or against is None or against > 0:
            return "unclear"
    return "better" if (summary.mean > 0) == metric.more_is_better else "worse"


def interval(summary: Summary, metric: Metric) -> str:
    """The confidence interval: ``"-1.2 to +0.3 %"``; a dash where there is none."""
    if summary.low is None or summary.high is None:
        return "-"
    low, high = (metric.told(value) for value in (summary.low, summary.high))
    return f"{low:+.2f} to {high:+.2f} {_unit(metric)}"


def signed(difference: float, metric: Metric) -> str:
    """The change from A to B: ``"-1.8 %"``, or ``"+2.1 points"``."""
    return f"{metric.told(difference):+.2f} {_unit(metric)}"


def amount(difference: float, metric: Metric) -> str:
    """A change without its sign."""
    return f"{abs(metric.told(difference)):.2f} {_unit(metric)}"


def _unit(metric: Metric) -> str:
    return "%" if metric.ratio else "points"


def _amounts(summary: Summary, metric: Metric, inverted: bool) -> str:
    """The interval, all on one side of 0, as amounts."""
    assert summary.low is not None
    assert summary.high is not None
    ends = [-end if inverted else end for end in (summary.low, summary.high)]
    least, most = sorted(abs(metric.told(end)) for end in ends)
    return f"{least:.2f} to {most:.2f} {_unit(metric)}"


def groups(
    comparison: Comparison, by: Sequence[str]
) -> list[tuple[str, str, Summary, list[PairedValue]]]:
    """Field, value, summary and pairs of each group, fields in the order given."""
    found = []
    for name in by:
        members = defaultdict(list)
        for pair in comparison.pairs:
            members[_group_of(pair, name)].append(pair)
        found += [(name, value, comparison.summary(p), p) for value, p in members.items()]
    return found


def default_groups(comparison: Comparison) -> list[str]:
    """Of mask, policy, device and kernel, those that vary."""
    return [
        name
        for name in GROUP_FIELDS[:4]
        if len({_group_of(pair, name) for pair in comparison.pairs}) > 1
    ]


def _group_of(pair: PairedValue, name: str) -> str:
    if name == "mask":
        # One name may stand for several masks.
        return f"{pair.of.mask} [{pair.of.heads}] {pair.of.mask_digest[:6]}"
    return str(getattr(pair.of, name))


def groups_table(comparison: Comparison, by: Sequence[str]) -> Table:
    """One row a group: pairs, mean difference, interval, verdict."""
    metric = comparison.metric
    figures = ("pairs", f"{metric.title}, B against A", "95 % CI", "least", "most")
    table = table_frame("by", "", right=figures)
    table.add_column("B is")
    for name, members in groupby(groups(comparison, by), key=itemgetter(0)):
        for number, (_, value, summary, pairs) in enumerate(members):
            differences = [pair.difference for pair in pairs]
            ends = (signed(end(differences), metric) for end in (min, max))
            mean, ci = signed(summary.mean, metric), interval(summary, metric)
            label, outcome = "" if number else name, outcome_of(comparison, summary)
            table.add_row(label, value, str(summary.count), mean, ci, *ends, outcome)
    return table


def extremes(comparison: Comparison) -> list[str]:
    """The best and the worst pair, a line each."""
    metric = comparison.metric
    ordered = sorted(comparison.pairs, key=lambda pair: pair.difference)
    if metric.more_is_better:
        ordered.reverse()
    lines = []
    for label, pair in (("best", ordered[0]), ("worst", ordered[-1])):
        row = pair.of
        a, b = (f"{value / metric.scale:.4g}" for value in (pair.a, pair.b))
        policy = row.policy if row.policy == pair.policy_b else f"{row.policy}, {pair.policy_b}"
        floor = None if pair.noise is None else comparison.summary([pair]).noise_floor
        inside = " (within noise)" if floor and abs(pair.difference) <= floor else ""
        lines.append(
            f"{label:5} pair  {signed(pair.difference, metric)}  {a} -> {b} {metric.unit}  "
            f"{row.mask} [{row.heads}], {policy}, {row.device}, {row.kernel}{inside}"
        )
    return lines


def noise_line(comparison: Comparison, summary: Summary) -> str:
    """How large a difference noise alone makes."""
    metric = comparison.metric
    singles = [comparison.summary([pair]).noise_floor for pair in comparison.pairs]
    known = sorted(floor for floor in singles if floor is not None)
    if not known or summary.noise_floor is None or known[-1] == 0:
        return f"noise  {comparison.noise_origin}"
    return (
        f"noise  up to {amount(known[len(known) // 2], metric)} between two equal rows (median "
        f"pair), {amount(summary.noise_floor, metric)} between the means; {comparison.noise_origin}"
    )


def records(comparison: Comparison, by: Sequence[str], verdict: Verdict) -> list[dict[str, Any]]:
    """Flat records of `wavealign.compare/1`: the whole, groups, pairs.

    Args:
        comparison: of the pairs.
        by: fields that groups are made by.
        verdict: on the whole.
    """
    metric = comparison.metric

    def summary_fields(summary: Summary) -> dict[str, Any]:
        def shown(value: float | None) -> float | None:
            return None if value is None else metric.written(value)

        suffix = "ratio" if metric.ratio else "points"
        parts = {"mean": summary.mean, "low": summary.low, "high": summary.high}
        values = {**parts, "noise": summary.noise_floor}
        named = {f"{name}_{suffix}": shown(value) for name, value in values.items()}
        return {"pairs": summary.count, **named, "outcome": outcome_of(comparison, summary)}

    head, summary = {"schema": COMPARE_SCHEMA, "metric": metric.name}, comparison.summary()
    whole = {
        **head, "kind": "all", **summary_fields(summary), "verdict": verdict.text,
        "only_a": len(comparison.only_a), "only_b": len(comparison.only_b),
        "unusable": comparison.unusable, "noise_origin": comparison.noise_origin,
        "interval_over": "masks" if summary.by_mask else "pairs",
        "differs": {name: list(values) for name, values in comparison.differs.items()},
    }  # fmt: skip
    lines = [whole]
    for name, value, of_group, _ in groups(comparison, by):
        lines.append({**head, "kind": "group", "by": name, "is": value, **summary_fields(of_group)})
    same = ("mask", "mask_digest", "heads", "device", "kernel", "wave", "regime", "source", "seed")
    for pair in comparison.pairs:
        row = pair.of.flat()
        change = metric.written(pair.difference)
        lines.append({
            **head, "kind": "pair", **{name: row[name] for name in same},
            "policy_a": pair.of.policy, "policy_b": pair.policy_b, "a": pair.a, "b": pair.b,
            "ratio" if metric.ratio else "points": change,
        })  # fmt: skip
    return lines
