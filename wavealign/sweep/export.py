"""The exports of a sweep: which trials, in which order, and the Parquet table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from wavealign.outputs import whole_file
from wavealign.runs.result import FIELD_TYPES, FIELDS
from wavealign.runs.trial import TrialRecord


def sorted_done(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Trials with a result, in the order of the exports."""
    return sorted((r for r in records if r.result is not None), key=sort_key)


def sort_key(record: TrialRecord) -> tuple[Any, ...]:
    """Where a trial stands in an export; no two specs stand at one place."""
    spec = record.spec
    heads = int(spec.heads.partition(",")[0].partition("-")[0])
    return (
        spec.source, spec.mask, heads, spec.heads, spec.device, spec.kernel, spec.wave,
        spec.l2_bytes or 0, spec.head_dim, spec.dtype, spec.model or "", spec.regime, spec.seed,
        spec.policy, spec.identity,
    )  # fmt: skip


def _utf8(value: Any) -> Any:
    """Names of files needn't be text; what Parquet calls a string is."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def write_parquet(path: Path, records: list[TrialRecord]) -> bool:
    """The result rows with trial id, planning time and seconds; False without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ModuleNotFoundError:
        return False
    types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    kinds = {"id": str, **{name: FIELD_TYPES[name] for name in FIELDS}}
    kinds |= {"planning_ms": float, "seconds": float}
    rows = [
        {
            "id": record.spec.identity,
            **{name: _utf8(value) for name, value in record.result.flat().items()},
            "planning_ms": record.planning_ms,
            "seconds": record.seconds,
        }
        for record in records
        if record.result is not None
    ]
    # A column of nulls has a type, too.
    schema = pa.schema([
        (name, types.get((get_args(kind) or (kind,))[0], pa.string()))
        for name, kind in kinds.items()
    ])  # fmt: skip
    with whole_file(path) as stream:
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows, schema=schema), stream)
    return True
