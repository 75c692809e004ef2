"""Old addresses: where modules, and names of modules, went when the rooms were redrawn.

`import wavealign` puts a finder behind Python's own. It knows the old modules by the table below
and gives, for each, a module that holds nothing: what it is asked for comes from the new address,
with a DeprecationWarning at the line that asks.

A finder, because ``from wavealign.video.grid import TokenGrid``, and a pickle that was written
then, import a module: no `__getattr__` of a package can give one, and the other way would be a
file at every old place. It comes last, so what exists is never looked up here. The addresses are
no arrows of the house: nothing inside asks for an old one (a test sees to it).

A move is one line: of a module, with all that is in it and below it, in `MODULES`; of a name that
went elsewhere than the rest of its module, or is called otherwise now, in `NAMES`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "wavealign.gpu.rows": "wavealign.gpu.row_table",
    "wavealign.methods.adaspa": "wavealign.sessions.adaspa",
    "wavealign.methods.diagnostics": "wavealign.gpu.importance.diagnostics",
    "wavealign.methods.gsrs": "wavealign.sessions.gsrs",
    "wavealign.methods.importance": "wavealign.gpu.importance.attend",
    "wavealign.methods.liteattention": "wavealign.sessions.liteattention",
    "wavealign.methods.numbers": "wavealign.numbers",
    "wavealign.methods.site": "wavealign.methods.context",
    "wavealign.methods.sources": "wavealign.qk.sources",
    "wavealign.methods.steps": "wavealign.sessions.rule",
    "wavealign.methods.trajectory": "wavealign.qk.trajectory",
    "wavealign.order.rows": "wavealign.order.row_orders",
    "wavealign.planning.rows": "wavealign.planning.row_orders",
    "wavealign.report.metrics": "wavealign.runs.metrics",
    "wavealign.report.pairs": "wavealign.runs.pairing",
    "wavealign.report.rows": "wavealign.runs.files", "wavealign.results": "wavealign.runs.result",
    "wavealign.sessions.sites": "wavealign.sessions.layer_state",
    "wavealign.sim.ranking": "wavealign.runs.ranking",
    "wavealign.sweep.records": "wavealign.runs.trial", "wavealign.video": "wavealign.qk",
}  # fmt: skip

DOCUMENTED = {
    "wavealign.methods.adaspa.Session": "wavealign.sessions.AdaSpaSession",
    "wavealign.methods.gsrs.Session": "wavealign.sessions.GsrsSession",
    "wavealign.methods.liteattention.Session": "wavealign.sessions.LiteAttentionSession",
}
"""Names that guides go on using: they stay, and say nothing."""

NAMES = {
    "wavealign.methods.FileSource": "wavealign.qk.FileSource",
    "wavealign.methods.QKSource": "wavealign.qk.QKSource",
    "wavealign.methods.TensorSource": "wavealign.qk.TensorSource",
    "wavealign.methods.site.Site": "wavealign.methods.context.HeadContext",
    "wavealign.results.ResultWriter": "wavealign.runs.lines.ResultWriter",
    "wavealign.sessions.sites.Site": "wavealign.sessions.layer_state.LayerState",
    "wavealign.sweep.records.TrialSpec": "wavealign.runs.launch.Launch",
}


def install() -> None:
    """Let old addresses be found, in this process."""
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)


def moved_name(module: str, name: str) -> Any:
    """What a module that may be an old one was asked for, at the line two calls above.

    Raises:
        AttributeError: neither the module nor its successor has such a name.
    """
    old, successor = f"{module}.{name}", _successor(module)
    new = DOCUMENTED.get(old) or NAMES.get(old) or (successor and f"{successor}.{name}")
    if new is None or (name.startswith("__") and name != "__all__"):
        raise AttributeError(f"module '{module}' has no attribute '{name}'")
    home, _, own = new.rpartition(".")
    there = importlib.import_module(home)
    if own == "__all__":
        return getattr(there, own, [public for public in vars(there) if public[0] != "_"])
    found = getattr(there, own)
    if old not in DOCUMENTED:
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)
    return found


def _successor(module: str) -> str | None:
    """The module that an old one became; None for what is none."""
    if module in MODULES:
        return MODULES[module]
    package, _, last = module.rpartition(".")
    above = _successor(package) if package else None
    return f"{above}.{last}" if above is not None else None


class _OldModule(ModuleType):
    """Nothing but the way to its successor."""

    def __getattr__(self, name: str) -> Any:
        return moved_name(self.__name__, name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(_successor(self.__name__) or "wavealign"))


class _Finder:
    """Finds old modules, and is their loader."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """A spec where a successor exists, else none, and Python says what it always says."""
        successor = _successor(name)
        there = importlib.util.find_spec(successor) if successor is not None else None
        if there is None:
            return None
        package = there.submodule_search_locations is not None
        return ModuleSpec(name, _Finder, is_package=package)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """Empty: see `_OldModule`."""
        return _OldModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Nothing to run."""
