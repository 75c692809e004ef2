"""The page: everything gathered, rendered into one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from wavealign._version import __version__
from wavealign.foreign import shown
from wavealign.masks.block_mask import BlockMask
from wavealign.report.page import answers, figures, prediction, provenance, svg
from wavealign.report.page.curves import CurveSet
from wavealign.report.page.gather import Block, Unit, blocks, unit_of
from wavealign.runs.files import Loaded
from wavealign.structures import json_text

_MOST_BYTES = 1_950_000  # of the page; rows of the table that don't fit are counted
_MOST_CELLS = 2400  # of heat maps, over all settings: some 0.5 kB each with its tip and its point
_FEWEST_POLICIES = 8

# Field, heading, digits, factor; None for text. Columns with a single value become a sentence.
_COLUMNS: tuple[tuple[str, str, int | None, float], ...] = (
    ("policy", "policy", None, 1), ("mask", "mask", None, 1), ("speedup", "speedup (×)", 3, 1),
    ("time_ms", "time (ms)", 2, 1), ("l2_hit_frac", "L2 hit (%)", 1, 100),
    ("hbm_read_bytes", "HBM reads (GB)", 2, 1e-9), ("energy_j", "energy (J)", 2, 1),
    ("planning_ms", "planning (ms)", 1, 1), ("heads", "heads", None, 1),
    ("source", "source", None, 1), ("device", "device", None, 1), ("kernel", "kernel", None, 1),
    ("regime", "regime", None, 1), ("device_digest", "profile", None, 1),
    ("limit_ms", "limit (ms)", 2, 1), ("clock_ghz", "clock (GHz)", 2, 1),
    ("wave", "W", 0, 1), ("seed", "seed", 0, 1),
)  # fmt: skip
_FILTERS = ("source", "device", "kernel", "regime", "mask", "policy")


def render(
    loaded: Loaded, masks: Mapping[Unit, BlockMask], curves: Sequence[CurveSet], title: str
) -> str:
    """The page as HTML.

    Args:
        loaded: rows and failed trials.
        masks: those at hand, for their shapes.
        curves: miss-ratio curves, computed before.
        title: of the page.
    """
    from jinja2 import Environment

    found = blocks(loaded)
    page = files("wavealign.report.page")
    script, css, source = (
        page.joinpath(f"page.{suffix}").read_text(encoding="utf-8")
        for suffix in ("js", "css", "html")
    )
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_text)
    environment.filters.update(breakable=breakable, change=_change, signs=_signs)
    template = environment.from_string(source)
    columns = sum(len(block.columns) for block in found)
    most = max(_FEWEST_POLICIES, _MOST_CELLS // max(1, columns))
    fields: dict[str, Any] = {
        "title": title, "version": __version__, "key": svg.key, "line_key": svg.line_key,
        "css": Markup(css), "script": Markup(script),  # our own files
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "answers": [answers.answer(block) for block in found],
        "blocks": [_block(block, most) for block in found],
        "curves": curves,
        "predictions": prediction.predictions(loaded.rows),
        "facts": [(block.label, provenance.setting_facts(block)) for block in found],
        "masks": provenance.mask_facts(loaded.rows, masks),
        "counts": loaded.counts, "failed": loaded.failed, "notes": loaded.notes,
    }  # fmt: skip

    def with_table(most_bytes: int) -> str:
        table = _table(found, most_bytes)
        return template.render(**fields, table=table, data=Markup(_script_json(table["data"])))

    rest = len(with_table(0).encode(errors="replace"))
    return with_table(_MOST_BYTES - rest)


def breakable(text: str) -> Markup:
    """A name that may be broken at its joints, instead of running out of its box."""
    return Markup("<wbr>").join(re.split(r"(?<=[+/,_])|(?=[(\[])", shown(text)))


def _text(value: Any) -> Any:
    """What a place of the template shows, escaped by what follows; markup is our own."""
    return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _change(ratio: float) -> str:
    """A ratio as a change: ``"−17 %"``."""
    percent = round(100 * (ratio - 1))
    return _signs(f"{percent:+d} %" if percent else "±0 %")


def _signs(text: str) -> str:
    """Minus signs, and no line break before a %."""
    return text.replace("-", "\N{MINUS SIGN}").replace(" %", "\N{NO-BREAK SPACE}%")


def _block(block: Block, most: int) -> dict[str, Any]:
    """What the template shows of a setting."""
    best = block.ranking[0][0] if block.ranking else None
    policies = figures.shown_policies(block, most)
    return {
        "label": block.label, "source": block.setting.source, "columns": block.columns,
        "heat": figures.heat_rows(block, policies),
        "left_out": len(block.standings) - len(policies),
        "several": len(block.columns) > 1, "best": best, "bests": answers.best_rows(block),
        "energy": any(row.result.energy_j is not None for row in block.rows),
        "hits": figures.hit_against_time(block, set(policies)),
        "costs": figures.cost_against_gain(block),
        "heads": figures.head_tables(block),
    }  # fmt: skip


def _table(found: Sequence[Block], most_bytes: int) -> dict[str, Any]:
    """Every run as columns and rows of plain values; what never varies becomes a sentence."""
    records = []
    for block in found:
        for row in block.rows:
            unit = unit_of(row.result)
            cell = block.units[unit][row.result.policy]
            extra = {"planning_ms": row.planning_ms, "speedup": cell.speedup}
            records.append({**row.result.flat(), "mask": block.families[unit], **extra})
    shown, constant = [], []
    for column in _COLUMNS:
        name, heading, digits, factor = column
        values: set[Any] = {record[name] for record in records}
        if values == {None}:
            continue
        if len(values) == 1 and name not in ("policy", "mask", "time_ms"):
            (value,) = values
            text = value if digits is None else f"{value * factor:.{digits}f}"
            constant.append(f"{heading} {text}")
        else:
            shown.append(column)
    rows: list[list[Any]] = []
    size = 0
    for record in records:
        line = [_compact(record[name], digits, factor) for name, _, digits, factor in shown]
        size += len(_script_json(line)) + 1
        if size > most_bytes:
            break
        rows.append(line)
    names = [column[0] for column in shown]
    columns = [
        {"name": heading, "digits": digits, "sticky": name == "policy"}
        for name, heading, digits, _ in shown
    ]
    filters = [names.index(name) for name in _FILTERS if name in names]
    data = {"columns": columns, "filters": filters, "rows": rows}
    left_out = len(records) - len(rows)
    return {"count": len(rows), "left_out": left_out, "constant": constant, "data": data}


def _compact(value: Any, digits: int | None, factor: float) -> Any:
    if value is None or digits is None:
        return shown(value) if isinstance(value, str) else value
    return round(value * factor, digits + 1) if digits else value


def _script_json(value: Any) -> str:
    """JSON that can't end the script element around it."""
    text = json_text(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_page(path: str | Path, text: str) -> int:
    """Write the page, whole or not at all; its size in bytes.

    Raises:
        InputError: the path can't be written.
    """
    from wavealign.outputs import whole_file

    data = text.encode("utf-8", "replace")  # file names needn't be text
    with whole_file(path) as stream:
        stream.write(data)
    return len(data)
