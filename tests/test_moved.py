"""Old addresses: the same objects as at the new ones, with a warning at the line that asks."""

from __future__ import annotations

import importlib
import io
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import wavealign
from wavealign import _moved
from wavealign.qk.grid import TokenGrid

# What guides, tests and benchmarks asked for before: old address, new address.
MOVED = [
    ("wavealign.gpu.rows.TritonRows", "wavealign.gpu.row_table.TritonRows"),
    ("wavealign.methods.FileSource", "wavealign.qk.sources.FileSource"),
    ("wavealign.methods.QKSource", "wavealign.qk.sources.QKSource"),
    ("wavealign.methods.TensorSource", "wavealign.qk.sources.TensorSource"),
    ("wavealign.methods.adaspa.AdaSpa", "wavealign.sessions.adaspa.AdaSpa"),
    ("wavealign.methods.diagnostics.Diagnosis", "wavealign.gpu.importance.diagnostics.Diagnosis"),
    ("wavealign.methods.gsrs.Gsrs", "wavealign.sessions.gsrs.Gsrs"),
    ("wavealign.methods.importance.Importance", "wavealign.gpu.importance.Importance"),
    (
        "wavealign.methods.importance.attend_with_importance",
        "wavealign.gpu.importance.attend_with_importance",
    ),
    (
        "wavealign.methods.liteattention.LiteAttention",
        "wavealign.sessions.liteattention.LiteAttention",
    ),
    ("wavealign.methods.numbers.whole_number", "wavealign.numbers.whole_number"),
    ("wavealign.methods.site.Site", "wavealign.methods.context.HeadContext"),
    ("wavealign.methods.sources.save_qk", "wavealign.qk.sources.save_qk"),
    ("wavealign.methods.steps.Rule", "wavealign.sessions.rule.Rule"),
    ("wavealign.methods.trajectory.NoisyTrajectory", "wavealign.qk.trajectory.NoisyTrajectory"),
    ("wavealign.order.rows.nnz", "wavealign.order.row_orders.nnz"),
    ("wavealign.planning.rows.by_nnz", "wavealign.planning.row_orders.by_nnz"),
    ("wavealign.report.metrics.METRICS", "wavealign.runs.metrics.METRICS"),
    ("wavealign.report.pairs.compare_rows", "wavealign.runs.pairing.compare_rows"),
    ("wavealign.report.rows.load_rows", "wavealign.runs.files.load_rows"),
    ("wavealign.results.ResultWriter", "wavealign.runs.lines.ResultWriter"),
    ("wavealign.results.RunResult", "wavealign.RunResult"),
    ("wavealign.sessions.sites.Site", "wavealign.sessions.layer_state.LayerState"),
    ("wavealign.sim.ranking.rank", "wavealign.runs.ranking.rank"),
    ("wavealign.sweep.records.TrialRecord", "wavealign.runs.trial.TrialRecord"),
    ("wavealign.sweep.records.TrialSpec", "wavealign.runs.launch.Launch"),
    ("wavealign.video.ORDERS", "wavealign.qk.ORDERS"),
    ("wavealign.video.clip.read_frames", "wavealign.qk.clip.read_frames"),
    ("wavealign.video.clip_source.ClipSource", "wavealign.qk.clip_source.ClipSource"),
    ("wavealign.video.concentration.PROFILES", "wavealign.qk.concentration.PROFILES"),
    ("wavealign.video.grid.TokenGrid", "wavealign.qk.grid.TokenGrid"),
    ("wavealign.video.hilbert.hilbert_curve", "wavealign.qk.hilbert.hilbert_curve"),
    ("wavealign.video.orders.token_order", "wavealign.qk.orders.token_order"),
    ("wavealign.video.rope.rotate", "wavealign.qk.rope.rotate"),
    ("wavealign.video.vit.ImageViT", "wavealign.qk.vit.ImageViT"),
]
TORCHLESS = {
    "wavealign.methods.numbers", "wavealign.methods.site", "wavealign.order.rows",
    "wavealign.report.metrics", "wavealign.report.pairs", "wavealign.report.rows",
    "wavealign.results", "wavealign.sim.ranking", "wavealign.sweep.records", "wavealign.video",
    "wavealign.video.grid", "wavealign.video.hilbert", "wavealign.video.orders",
}  # fmt: skip


def at(address):
    home, _, name = address.rpartition(".")
    if home not in TORCHLESS:
        pytest.importorskip("torch")
    return getattr(importlib.import_module(home), name)


@pytest.mark.parametrize(("old", "new"), MOVED)
def test_an_old_address_gives_the_new_object_and_says_so(old, new):
    with pytest.warns(DeprecationWarning, match=f"^{old} is now wavealign") as said:
        found = at(old)
    assert {Path(one.filename) for one in said} == {Path(__file__)}
    assert found is at(new)


@pytest.mark.parametrize("name", ["gsrs", "adaspa", "liteattention"])
def test_documented_sessions_stay_without_a_word(name):
    pytest.importorskip("torch")
    space = {}
    exec(
        f"from wavealign.methods import {name}\n"
        f"from wavealign.methods.{name} import Session\n"
        f"import wavealign.methods.{name} as module\n",
        space,
    )
    from wavealign.sessions import SESSIONS

    assert space["Session"] is space[name].Session is space["module"].Session is SESSIONS[name]
    assert getattr(wavealign.methods, name) is space[name]


def test_every_form_of_import():
    with pytest.warns(DeprecationWarning, match=r"wavealign\.video\."):
        exec(
            "import wavealign.video.grid\n"
            "import wavealign.video.grid as grid\n"
            "from wavealign import video\n"
            "from wavealign.video import TokenGrid as one, grid as same\n"
            "from wavealign.video.grid import TokenGrid as two\n"
            "from wavealign.video.grid import *\n"
            "assert wavealign.video is video and wavealign.video.grid is grid\n"
            "assert one is two is TokenGrid is grid.TokenGrid\n",
            {},
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("wavealign.video.hilbert")  # nothing of it was used yet


def test_what_never_was_is_an_error_as_ever():
    for module in ("wavealign.video.nonsense", "wavealign.video.grid.deeper", "wavealign.nonsense"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{module}'"):
            importlib.import_module(module)
    with pytest.raises(ImportError, match=r"cannot import name 'nonsense' from 'wavealign.video"):
        exec("from wavealign.video.grid import nonsense")
    with pytest.raises(
        ImportError, match=r"cannot import name 'nonsense' from 'wavealign.methods'"
    ):
        exec("from wavealign.methods import nonsense")
    old = importlib.import_module("wavealign.video.grid")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = old.nonsense
    with pytest.raises(AttributeError, match=r"'wavealign\.video\.grid' has no attribute '__file_"):
        _ = old.__file__
    with pytest.raises(AttributeError, match="module 'wavealign' has no attribute 'nonsense'"):
        _ = wavealign.nonsense
    assert "TokenGrid" in dir(old)


def test_pickles_that_were_written_before():
    written = pickle.dumps(TokenGrid(2, 3, 4), protocol=2)
    before = written.replace(b"wavealign.qk.grid", b"wavealign.video.grid")
    assert before != written
    with pytest.warns(DeprecationWarning, match="wavealign.video.grid.TokenGrid is now"):
        assert pickle.load(io.BytesIO(before)) == TokenGrid(2, 3, 4)


def test_the_keyword_that_was_called_site():
    torch = pytest.importorskip("torch")
    from wavealign.methods import head_mask, head_masks
    from wavealign.methods.context import HeadContext
    from wavealign.methods.params import Exact

    q = torch.randn(2, 64, 8, generator=torch.manual_seed(0))
    context, few = HeadContext(0, 64, text_tokens=20), Exact(mass=0.1, block=16)
    for function, x in ((head_mask, q[0]), (head_masks, q)):
        with pytest.warns(DeprecationWarning, match="site= is now context=") as said:
            found = function("exact", x, x, few, site=context)
        assert said[0].filename == __file__
        assert torch.equal(found, function("exact", x, x, few, context=context))
        assert not torch.equal(found, function("exact", x, x, few))


def test_the_house_asks_for_no_old_address():
    stays = re.compile("|".join(map(re.escape, _moved.DOCUMENTED)))
    old = re.compile(r"\b(" + "|".join(map(re.escape, [*_moved.MODULES, *_moved.NAMES])) + r")\b")
    for path in Path(wavealign.__file__).parent.rglob("*.py"):
        if path.name != "_moved.py":
            assert not old.findall(stays.sub("", path.read_text())), path
    # Moves lead to what exists now, not to another move.
    assert not set(_moved.MODULES) & set(_moved.MODULES.values())
    covered = {old.rpartition(".")[0] for old, _ in MOVED}
    assert set(_moved.MODULES) <= covered


def test_old_addresses_keep_the_import_light():
    code = (
        "import sys, wavealign, warnings; warnings.simplefilter('ignore');"
        "assert not [m for m in sys.modules if m.startswith('wavealign.qk')];"
        "import wavealign.video.grid; from wavealign.methods import gsrs;"
        "sys.exit(sorted({'torch', 'numba', 'scipy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
