"""Tables of what benchmarks/gsrs_sessions.py measured, from its JSON lines."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

from common import Row, markdown, read_rows, step_plot


def report(out: Path) -> str:
    """Markdown of the last run in OUT of each section."""
    rows = read_rows([out / "sessions.jsonl"])
    by_section: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_section[row["section"]].append(row)
    parts = [runs(by_section["run"]), searches(by_section["search"], by_section["step"])]
    parts += [under_diffusers(by_section["diffusers"]), liteattention(by_section["lite"])]
    for row in by_section["overhead"][-1:]:
        parts.append(
            f"Overhead of searches 2 to 4: {row['full_ms']:.1f} ms over all blocks, "
            f"{row['reduced_ms']:.1f} ms reduced; factor {row['factor']}, the paper's "
            f"{row['paper']}."
        )
    failed = [f"{row['section']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n\n".join(filter(None, [*parts, *failed]))


def table(head: list[str], body: list[list[str]]) -> str:
    """Markdown, or nothing."""
    return markdown(head, body) if body else ""


def runs(rows: list[Row]) -> str:
    """The time of each run, and where it went."""
    last = {row["session"]: row for row in rows if "total_ms" in row}
    dense = last.get("full attention", {}).get("total_ms")
    body = []
    for name, row in last.items():
        by, own = row["by_action_ms"], row.get("own_ms", {})
        cells = [name, f"{row['total_ms']:.0f}"]
        cells += [f"{by[kind]:.0f}" if kind in by else "" for kind in ("full", "search", "reuse")]
        cells.append(f"{own['planned']:.1f}" if "planned" in own else "")
        whole = dense and not name.startswith("liteattention")  # which has fewer steps
        cells.append(f"{dense / row['total_ms']:.3f}x" if whole else "")
        body.append(cells)
    head = ["run", "ms", "full steps", "searches, plans included", "reused steps", "planning"]
    return table([*head, "speedup"], body)


def searches(found: list[Row], steps: list[Row]) -> str:
    """Each search, and the steps that reused its mask."""
    calls = {row["step"]: row["ms"] for row in steps}
    last = {(row["session"], row["step"]): row for row in found}
    by_session: dict[str, list[int]] = defaultdict(list)
    for name, step in last:
        by_session[name].append(step)
    body = []
    for name, at in by_session.items():
        for i, step in enumerate(at):
            row = last[name, step]
            end = at[i + 1] if i + 1 < len(at) else max(calls) + 1
            reused = [calls[s][name] for s in range(step + 1, end) if name in calls.get(s, {})]
            policies: dict[str, int] = defaultdict(int)
            for line in row["policies"]:
                policies[line.partition(": ")[2].partition(",")[0]] += 1
            mean = statistics.fmean(reused) if reused else None
            body.append([
                name, str(step), f"{row['evaluated']:.3f}", f"{row['density']:.3f}",
                f"{row['ms']:.1f}", f"{row['planned_ms']:.2f}",
                f"{mean:.2f}" if mean is not None else "", str(len(reused)),
                f"{row['planned_ms'] / len(reused):.2f}" if reused else "",
                ", ".join(f"{policy} {heads}" for policy, heads in policies.items()),
            ])  # fmt: skip
    head = ["session", "search", "evaluated", "density", "search, ms", "planning", "a reused step"]
    return table([*head, "reused", "planning a use", "heads by policy"], body)


def under_diffusers(rows: list[Row]) -> str:
    """Steps of the model."""
    last = {(row["tokens"], row["run"]): row for row in rows if "run" in row}
    body = []
    for (tokens, name), row in last.items():
        densities: dict[int, list[float]] = defaultdict(list)
        for record in row.get("found", []):
            densities[record["step"]].append(record["density"])
        total = row["mean_step_ms"] * (len(row["step_ms"]) if densities else 1)
        body.append([
            f"{tokens:,}", name, f"{row['mean_step_ms']:.2f}", f"{total:.0f}" if densities else "",
            ", ".join(f"{s}: {statistics.fmean(d):.3f}" for s, d in densities.items()),
            f"{row['own_ms']['planned']:.1f}" if densities else "", str(row["finite"]),
        ])  # fmt: skip
    head = ["tokens", "run", "ms a step of the model", "whole run, ms", "density at the searches"]
    return table([*head, "planning, ms", "finite"], body)


def liteattention(rows: list[Row]) -> str:
    """Its steps."""
    body = [
        [str(row["of_trajectory"]), f"{row['ms']:.0f}", f"{row['density']:.3f}"]
        for row in rows if "of_trajectory" in row
    ]  # fmt: skip
    return table(["liteattention, step of 50", "ms, marking included", "density after it"], body)


SHOWN = {
    "full attention": ("full attention", "#8a919c"),
    "gsrs, original": ("GSRS, original order", "#d9822b"),
    "gsrs, resync": ("GSRS, resync", "#3b6fb6"),
    "topk, auto": ("top-k 20 %", "#3f8f6b"),
}


def plot_steps(out: Path, target: str) -> None:
    """A call's time at every step, one line a run."""
    from wavealign.report.plots import INK, check_plot, save

    path = check_plot(target)
    rows = read_rows([out / "sessions.jsonl"])
    steps = [row for row in rows if row["section"] == "step"]
    figure, axis = step_plot((8.5, 3.8))
    for name, (label, colour) in SHOWN.items():
        times = [row["ms"][name] for row in steps]
        axis.step([row["step"] for row in steps], times, where="mid", color=colour,
                  linewidth=1.6, label=label)  # fmt: skip
    axis.set_xlabel("step", fontsize=9.5, color=INK)
    axis.set_ylabel("attention of one layer (ms)", fontsize=9.5, color=INK)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8, labelcolor=INK)
    save(figure, path)
