"""Sessions over a run: GSRS, AdaSpa, LiteAttention, against slow float64 ones; what they refuse."""

import contextlib
import copy
import dataclasses
import itertools
import math
import threading
import warnings

import numpy as np
import pytest
import session_oracles as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

from helpers import alive, nothing_waits  # noqa: E402

from wavealign.errors import InputError, MissingCapabilityError  # noqa: E402
from wavealign.gpu.importance.attend import attend_with_importance  # noqa: E402
from wavealign.methods import select  # noqa: E402
from wavealign.planning.masks import mask_from_packed  # noqa: E402
from wavealign.planning.planner import Planner  # noqa: E402
from wavealign.qk import TokenGrid, token_order  # noqa: E402
from wavealign.qk.trajectory import NoisyTrajectory, synthetic_qk  # noqa: E402
from wavealign.sessions import (  # noqa: E402
    SESSIONS,
    AdaSpaSession,
    GsrsSession,
    LiteAttentionSession,
    Session,
    adaspa,
    gsrs,
    liteattention,
    make_session,
)
from wavealign.sessions.plans import own_copy, pack  # noqa: E402
from wavealign.sessions.rule import Memory  # noqa: E402
from wavealign.sessions.tokens import TokenOrder  # noqa: E402

BLOCK = (8, 6)
GRID = TokenGrid(2, 4, 6)  # 48 tokens; with text 53: ragged blocks
OPTIONS = {"block": BLOCK, "backend": "reference", "policy": "lockstep", "profile": "h200"}
SEARCH, SHARES, STEPS = (1, 3, 5), (0.9, 0.7, 0.6), 7


def run_inputs(seed, batch=1, heads=2, tokens=48, dim=16, scale=2.5):
    """Step → q, k, v that drift slowly, so that blocks come and go."""
    rng = torch.Generator().manual_seed(seed)
    shape = (3, batch, tokens, heads, dim)
    base, drift = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)

    def at(step):
        q, k, v = math.cos(0.35 * step) * base + math.sin(0.35 * step) * drift
        return scale * q, k, v

    return at


def place(x, order):
    return np.concatenate([x[order], x[len(order) :]])


# --- selection -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from([0.2, 0.8, 0.95, 1.0]))
def test_selection_is_the_slow_one_row_by_row(seed, columns, share):
    rng = np.random.default_rng(seed)
    scores = rng.random((2, 3, columns)).astype(np.float32) * (rng.random((2, 3, columns)) < 0.8)
    among = rng.random(scores.shape) < 0.6
    count = np.array([rng.integers(1, columns + 1), rng.integers(1, columns + 1)])
    found = select.select_top_p(torch.from_numpy(scores), share, torch.from_numpy(among))
    largest = select.select_top_k(torch.from_numpy(scores), torch.from_numpy(count))
    for h in range(2):
        for m in range(3):
            row = scores[h, m].astype(float)
            slow = oracle.top_p(row, share, among[h, m])
            assert np.array_equal(found[h, m].numpy(), slow)
            assert np.array_equal(largest[h, m].numpy(), oracle.top_k(row, count[h]))


def test_selection_by_parts_is_selection_of_all(monkeypatch):
    scores = torch.rand(2, 3, 7, 5)
    among = torch.rand(scores.shape) < 0.5
    counts = torch.tensor([[1, 2, 3], [4, 5, 9]])
    whole = select.select_top_p(scores, 0.6, among), select.select_top_k(scores, counts)
    monkeypatch.setattr(select, "_ROWS_ENTRIES", 13)
    parts = select.select_top_p(scores, 0.6, among), select.select_top_k(scores, counts)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_selection_never_asks_for_a_value():
    """On the meta device there are none: whatever would make the host wait raises."""
    scores = torch.empty(1, 24, 9, 9, device="meta")
    among = torch.empty(scores.shape, dtype=torch.bool, device="meta")
    assert select.select_top_p(scores, 0.9, among).shape == scores.shape
    counts = adaspa.head_budgets(scores, 0.8)
    assert counts.shape == (1, 24)
    assert select.select_top_k(scores, counts).is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):
        scores.sum().item()


@pytest.mark.gpu
def test_selection_waits_for_nothing():
    scores = torch.rand(1, 4, 9, 9, device="cuda")
    among = torch.rand(scores.shape, device="cuda") < 0.5

    def select_all():
        select.select_top_p(scores, 0.9, among)
        select.select_top_k(scores, 3)
        select.select_top_k(scores, adaspa.head_budgets(scores, 0.8))

    select_all()  # compiles
    with nothing_waits():
        select_all()


# --- the run of GSRS -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "text", "batch", "reduced"),
    [(None, 0, 1, True), (GRID, 0, 2, True), (GRID, 5, 1, True), (None, 0, 1, False)],
)
def test_a_session_is_the_slow_one(grid, text, batch, reduced):
    inputs = run_inputs(3, batch, tokens=48 + text)
    session = GsrsSession(
        SEARCH, SHARES, steps=STEPS, grid=grid, text_tokens=text, reduced=reduced, **OPTIONS
    )
    outs, masks = [], []
    for step in range(STEPS):
        outs.append(session.attend(step, 0, *inputs(step)))
        masks.append(session.mask(0).numpy() if step >= SEARCH[0] else None)
    order = token_order("hilbert", grid) if grid else np.arange(48)
    for b in range(batch):
        for h in range(2):

            def one(step, b=b, h=h):
                return [place(x[b, :, h].numpy(), order) for x in inputs(step)]

            slow_outs, slow_masks = oracle.gsrs(STEPS, SEARCH, SHARES, one, BLOCK, reduced)
            for step in range(STEPS):
                out = place(outs[step][b, :, h].numpy(), order)
                np.testing.assert_allclose(out, slow_outs[step], atol=2e-5, err_msg=f"{step}")
                if masks[step] is not None:
                    assert np.array_equal(masks[step][b, h], slow_masks[step]), step
    found = session.statistics
    assert (found.full, found.searched, found.reused, found.plans) == (1, 3, 3, 3)


def test_masks_stay_inside_the_first_and_blocks_come_back():
    inputs = run_inputs(0)
    session = GsrsSession((1, 3, 5, 7), (0.9, 0.5, 0.5, 0.5), steps=9, **OPTIONS)
    masks = []
    for step in range(9):
        session.attend(step, 4, *inputs(step))
        if step in (1, 3, 5, 7):
            masks.append(session.mask(4))
        elif step > 1:
            assert torch.equal(session.mask(4), masks[-1])
    first, *later = masks
    assert all(not (keep & ~first).any() for keep in later)
    back = later[1] & ~later[0]
    assert back.any()
    searches = session.statistics.searches
    assert [record.step for record in searches] == [1, 3, 5, 7]
    densities = [float(m.float().mean()) for m in masks]
    assert [record.density for record in searches] == pytest.approx(densities)
    assert [record.evaluated for record in searches] == pytest.approx([1.0] + 3 * densities[:1])
    assert session.statistics.density(3) == pytest.approx(densities[1])
    assert math.isnan(session.statistics.density(2))


def test_top_p_at_one_keeps_the_attention_whole():
    inputs = run_inputs(1)
    session = GsrsSession((0, 1), (1.0, 1.0), steps=4, grid=GRID, **OPTIONS)
    for step in range(4):
        q, k, v = inputs(step)
        dense = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ).transpose(1, 2)
        torch.testing.assert_close(session.attend(step, 0, q, k, v), dense, atol=2e-5, rtol=1e-4)


def test_layers_and_branches_are_kept_apart():
    options = {"search_steps": (0, 2), "p": (0.8, 0.6), "steps": 4, **OPTIONS}
    together = make_session("gsrs", **options)
    places = [(0, "cond"), (0, "uncond"), (1, "cond")]
    runs = {where: run_inputs(i) for i, where in enumerate(places)}
    alone = {where: make_session("gsrs", **options) for where in places}
    for step in range(4):
        for layer, branch in places:
            q, k, v = runs[layer, branch](step)
            out = together.attend(step, layer, q, k, v, branch)
            own = alone[layer, branch].attend(step, layer, q, k, v, branch)
            assert torch.equal(out, own)
    assert not torch.equal(together.mask(0), together.mask(0, "uncond"))
    assert together.explain().splitlines()[0] == "layer 0, cond, head 0: lockstep, as asked"
    # One plan a search, layer and branch: not one a step.
    assert together.statistics.plans == 6
    assert together.statistics.reused == 6


def test_text_may_differ_from_branch_to_branch():
    inputs, run = run_inputs(2), ((1, 3), (0.9, 0.7))
    together = GsrsSession(*run, steps=5, grid=(3, 3, 5), **OPTIONS)
    longer = GsrsSession(*run, steps=5, grid=(3, 3, 5), text_tokens=3, **OPTIONS)
    shorter = GsrsSession(*run, steps=5, grid=(3, 3, 5), text_tokens=1, **OPTIONS)
    for step in range(5):
        whole, cut = inputs(step), [x[:, :46] for x in inputs(step)]
        out = together.attend(step, 0, *whole, "cond", text_tokens=3)
        assert torch.equal(out, longer.attend(step, 0, *whole))
        out = together.attend(step, 0, *cut, "uncond", text_tokens=1)
        assert torch.equal(out, shorter.attend(step, 0, *cut))
    together.reset()
    together.attend(0, 0, *whole, text_tokens=3)
    for tokens, message in (
        (2, "with 3 tokens of text before"), (-1, "with -1 tokens of text"), (3.0, "whole number"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            together.attend(1, 0, *whole, text_tokens=tokens)
    for tokens, message in ((2, "there are 2 of text"), (-1, "expected 0 or more")):
        with pytest.raises(InputError, match=message):
            together.attend(0, 1, *whole, text_tokens=tokens)
    together.attend(1, 0, *whole, text_tokens=3)


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_does_not_grow_with_lengths_of_text(name):
    """A run for each length: lists, orders and plans of the last ones alone are kept."""
    steps = {} if name == "liteattention" else {"search_steps": (0, 2)}
    steps |= {"p": (0.9, 0.7)} if name == "gsrs" else {}
    grid = TokenGrid(1, 4, 5)
    session = make_session(name, steps=3, grid=grid, **steps, **OPTIONS)
    kinds = (Planner, TokenOrder, torch.Tensor)
    before = set(map(id, alive(*kinds)))

    def kept():
        made = [x for x in alive(*kinds) if id(x) not in before]
        planners, orders, tensors = ([x for x in made if isinstance(x, k)] for k in kinds)
        return len(planners), len(orders), sum(x.nbytes for x in tensors)

    found = []
    for text in range(40):
        inputs = run_inputs(1, tokens=grid.tokens + text)
        for step in range(3):
            session.attend(step, 0, *inputs(step), text_tokens=text)
        session.reset()
        if text % 20 == 19:
            found.append(kept())
    assert max(max(count[:2]) for count in found) <= 16
    assert found[1][2] < 2 * found[0][2]  # and the texts are longer


def test_the_guard_leaves_short_launches_alone():
    inputs = run_inputs(2)
    session = GsrsSession((1, 3), (0.9, 0.7), steps=5, **{**OPTIONS, "policy": "auto"})
    for step in range(5):
        session.attend(step, 0, *inputs(step))
    assert "2 heads: original; looking would cost more" in session.explain()
    assert {p for r in session.statistics.searches for p in r.policies} == {"original"}


def test_the_guard_decides_once_a_search(monkeypatch):
    monkeypatch.setattr("wavealign.guard.decide.LOOK_FRAC", 1e9)  # these launches are tiny
    monkeypatch.setattr("wavealign.sessions.session.SEARCH_LOOK_FRAC", 1e9)
    inputs = run_inputs(2)
    options = {**OPTIONS, "policy": "auto"}
    session = GsrsSession((1, 3), (0.9, 0.7), steps=5, **options)
    for step in range(5):
        session.attend(step, 0, *inputs(step))
    assert "nothing is faster" in session.explain() or "not worth it" in session.explain()
    assert {p for r in session.statistics.searches for p in r.policies} == {"original"}
    assert session.statistics.seconds["planned"] > 0


def test_searches_read_their_candidates_as_the_first_mask_was_read(monkeypatch):
    inputs = run_inputs(2)
    session = GsrsSession((0, 2, 4), (0.9, 0.7, 0.5), steps=6, **OPTIONS)
    plan, lists = session._planners.plan, session._planners.lists
    chosen, read = iter(("lockstep", "original", "svd+nnz")), []

    def plan_otherwise(*arguments):  # as a guard may, from mask to mask
        made = plan(*arguments)
        schedule = dataclasses.replace(made.schedule, policies=(next(chosen),) * 2)
        return dataclasses.replace(made, schedule=schedule)

    def lists_noted(keep, prepared, policies):
        read.append(policies)
        return lists(keep, prepared, policies)

    monkeypatch.setattr(session._planners, "plan", plan_otherwise)
    monkeypatch.setattr(session._planners, "lists", lists_noted)
    for step in range(6):
        session.attend(step, 0, *inputs(step))
    assert read == [("lockstep",) * 2] * 2
    policies = [record.policies for record in session.statistics.searches]
    assert policies == [("lockstep",), ("original",), ("svd+nnz",)]


def test_what_a_rule_remembers_is_what_it_gets():
    inputs, seen = run_inputs(2), []

    class Wider(gsrs.Gsrs):
        """Candidates that are neither what is kept nor what was remembered."""

        def search(self, call, memory, attend):
            seen.append(memory.candidates)
            found = super().search(call, memory, attend)
            wider = found.keep | (torch.arange(found.keep.shape[-1]) == call.step)
            return dataclasses.replace(found, memory=Memory(candidates=wider))

    session, wanted = Session(Wider((0, 2, 4), (0.5, 0.5, 0.5), 6), **OPTIONS), []
    for step in range(6):
        session.attend(step, 0, *inputs(step))
        if step in (0, 2):
            wanted.append(session.mask(0) | (torch.arange(8) == step))
    assert [torch.equal(*pair) for pair in zip(seen[1:], wanted, strict=True)] == [True, True]
    assert seen[0] is None


def test_a_last_search_that_nobody_uses_is_not_planned():
    inputs = run_inputs(2)
    session = GsrsSession((0, 2), (0.9, 0.7), steps=3, **OPTIONS)
    for step in range(3):
        session.attend(step, 0, *inputs(step))
    assert session.statistics.plans == 1
    assert session.statistics.searches[-1].policies == ()


def test_without_the_look_at_values_it_is_the_same():
    inputs = run_inputs(5)
    one, two = (
        GsrsSession(SEARCH, SHARES, steps=STEPS, check_finite=check, **OPTIONS)
        for check in (True, False)
    )
    for step in range(STEPS):
        assert torch.equal(one.attend(step, 0, *inputs(step)), two.attend(step, 0, *inputs(step)))


def test_a_text_block_can_be_forced():
    inputs = run_inputs(6, tokens=53)
    session = GsrsSession(
        (0,), (0.3,), steps=2, grid=GRID, text_tokens=5, dense_text=True, **OPTIONS
    )
    session.attend(0, 0, *inputs(0))
    mask = session.mask(0)
    assert mask[..., 6:, :].all()  # query blocks of 8: 48 .. 52
    assert mask[..., 8:].all()  # K/V blocks of 6: 48 .. 52
    assert not mask[..., :6, :8].all()


# --- what is refused -------------------------------------------------------------------------


def elsewhere(function):
    """In another thread, to its end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_run_that_another_thread_cuts_off_does_not_go_on_in_its():
    mine, others = run_inputs(1), run_inputs(2)
    session = GsrsSession(SEARCH, SHARES, steps=STEPS, **OPTIONS)

    def run(inputs, steps):
        session.reset()
        return [session.attend(step, 0, *inputs(step)) for step in range(steps)]

    wanted = run(mine, STEPS)
    elsewhere(lambda: run(others, STEPS))  # one after the other
    run(mine, 3)
    elsewhere(lambda: run(others, 3))
    with pytest.raises(InputError, match="another thread reset the session in the middle of this"):
        session.attend(3, 0, *mine(3))
    assert all(torch.equal(*pair) for pair in zip(run(mine, STEPS), wanted, strict=True))


def test_a_call_during_which_another_thread_resets_is_refused():
    inputs, meanwhile = run_inputs(1), []

    def full(q, k, v):
        if meanwhile:
            elsewhere(meanwhile.pop())
        return v

    session = GsrsSession((3,), (0.5,), steps=STEPS, full_attention=full, **OPTIONS)
    session.attend(0, 0, *inputs(0))
    for others in (lambda: session.attend(1, 0, *inputs(1)), session.reset):
        meanwhile.append(others)
        with pytest.raises(InputError, match="another thread called or reset the session during"):
            session.attend(1, 0, *inputs(1))
        session.reset()
        session.attend(0, 0, *inputs(0))
    assert session.statistics.full == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search_steps": (10, 10, 30, 40)}, r"\[10, 10, 30, 40\] are out of order"),
        ({"search_steps": (20, 10, 30, 40)}, "out of order"),
        ({"search_steps": (10, 20, 30, 50)}, "of a run of 50 steps; expected 0 to 49"),
        ({"search_steps": (-1, 20, 30, 40)}, "expected 0 to 49"),
        ({"search_steps": ()}, "search steps: none"),
        ({"p": (0.95, 0.9, 0.85, 0.0)}, "p holds 0.0; expected shares above 0"),
        ({"p": (1.2, 0.9, 0.85, 0.8)}, "p holds 1.2"),
        ({"p": (0.9, math.nan, 0.85, 0.8)}, "p holds nan"),
        ({"p": (0.95, 0.9)}, "2 values of p and 4 search steps"),
        ({"search_steps": (10.5, 20, 30, 40)}, r"search steps: 10\.5; expected a whole number"),
        ({"search_steps": (10, 20, 30, math.nan)}, "search steps: nan"),
        ({"search_steps": "10,20,30,40"}, "search steps: '10,20,30,40'; expected a sequence"),
        ({"search_steps": ("10", "20", "30", "40")}, "search steps: '10'"),
        ({"search_steps": None}, "search steps: None"),
        ({"p": 0.9}, r"p: 0\.9; expected a sequence"),
        ({"p": ("0.9",) * 4}, r"p: '0\.9'; expected a number"),
        ({"steps": 0}, "a run of 0 steps"),
        ({"steps": 49.5}, r"steps: 49\.5"),
        ({"steps": "50"}, "steps: '50'"),
        ({"block": (128, 0)}, "at least 1"),
        ({"block": (1.5, 8)}, r"block: 1\.5"),
        ({"block": 128}, "block: 128; expected a sequence"),
        ({"grid": (2, 4)}, "expected frames, height and width"),
        ({"grid": (2, 4, 6.5)}, r"grid: 6\.5"),
        ({"grid": "2x4x6"}, "grid: '2x4x6'"),
        ({"backend": "trition"}, "Did you mean 'triton'"),
        ({"objective": "money"}, "unknown objective"),
        ({"regime": "stedy"}, "Did you mean 'steady'"),
        ({"profile": "h300"}, "unknown device"),
        ({"order": "hilbert"}, "needs the token grid"),
        ({"order": "hilbrt"}, "Did you mean 'hilbert'"),
        ({"text_tokens": -1}, "text tokens: -1"),
        ({"text_tokens": 1.5}, r"text tokens: 1\.5"),
        ({"policy": "lockstp"}, "lockstep"),
    ],
)
def test_settings_that_make_no_run(options, message):
    with pytest.raises(InputError, match=message):
        make_session("gsrs", **options)


def test_rules_refuse_what_means_nothing():
    with pytest.raises(InputError, match="reduced=False"):
        gsrs.Gsrs(select="top-k")
    with pytest.raises(InputError, match="expected top-p or top-k"):
        gsrs.Gsrs(select="top-q")
    with pytest.raises(InputError, match=r"keep holds 1\.5"):
        make_session("topk", keep=1.5)
    with pytest.raises(InputError, match="at least 1/3"):
        make_session("adaspa", sparsity=0.2)
    with pytest.raises(InputError, match="1 - sparsity"):
        make_session("adaspa", sparsity=1.0)
    with pytest.raises(InputError, match="threshold is nan"):
        make_session("liteattention", threshold=math.nan)
    with pytest.raises(InputError, match="threshold: '-10'"):
        make_session("liteattention", threshold="-10")
    with pytest.raises(InputError, match="warmup=50 in a run of 50 steps"):
        make_session("liteattention", warmup=50)
    with pytest.raises(InputError, match=r"warmup: 1\.5"):
        make_session("liteattention", warmup=1.5)
    with pytest.raises(InputError, match="Did you mean 'gsrs'"):
        make_session("gsr")
    assert adaspa.AdaSpa((10, 30), steps=50).uses(10) == 19


def test_numbers_of_any_kind_are_numbers():
    array = np.array([10, 20, 30, 40])
    for steps in (array, list(array), range(10, 50, 10), torch.from_numpy(array)):
        rule = make_session("gsrs", search_steps=steps, p=np.array([0.95, 0.9, 0.85, 0.8])).rule
        assert rule == gsrs.Gsrs()
        assert [type(step) for step in rule.search_steps] == [int] * 4


def test_what_surrounds_a_session_changes_nothing():
    inputs = run_inputs(12)
    for name in SESSIONS:
        own = {"threshold": -1.0} if name == "liteattention" else {"search_steps": (1, 3)}
        own |= {"p": (0.9, 0.7)} if name == "gsrs" else {}
        plain, cast, elsewhere = (make_session(name, steps=5, **own, **OPTIONS) for _ in range(3))
        for step in range(5):
            q, k, v = inputs(step)
            wanted = plain.attend(step, 0, q, k, v)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(cast.attend(np.int64(step), 0, q, k, v), wanted)
            with torch.device("meta"):  # whatever doesn't say where it is made
                assert torch.equal(elsewhere.attend(step, 0, q, k, v), wanted)


def test_a_wrong_call_leaves_the_session_as_it_was():
    inputs = run_inputs(7)
    session = GsrsSession((1, 3), (0.9, 0.7), steps=5, **OPTIONS)
    with pytest.raises(InputError, match="layer 0, branch 'cond': step 1 skips step 0"):
        session.attend(1, 0, *inputs(1))
    with pytest.raises(InputError, match="nothing was searched yet"):
        session.mask(0)
    session.attend(0, 0, *inputs(0))
    with pytest.raises(InputError, match="step 0 was done already; expected step 1"):
        session.attend(0, 0, *inputs(0))
    with pytest.raises(InputError, match="step 2 skips step 1"):
        session.attend(2, 0, *inputs(2))
    with pytest.raises(InputError, match="step 5 of a run of 5 steps"):
        session.attend(5, 0, *inputs(2))
    for none in ("1", None, 1.0):
        with pytest.raises(InputError, match=f"step: {none!r}; expected a whole number"):
            session.attend(none, 0, *inputs(1))
    q, k, v = inputs(1)
    with pytest.raises(InputError, match=r"q is \[1, 40, 2, 16\] float32 on cpu at step 1 and was"):
        session.attend(1, 0, q[:, :40], k[:, :40], v[:, :40])
    with pytest.raises(InputError, match=r"\[2, 48, 2, 16\]"):
        session.attend(1, 0, *(torch.cat([x, x]) for x in (q, k, v)))
    with pytest.raises(InputError, match="bfloat16 on cpu at step 1"):
        session.attend(1, 0, *(x.bfloat16() for x in (q, k, v)))
    with pytest.raises(InputError, match="expected self-attention"):
        session.attend(1, 0, q, k[:, :24], v[:, :24])
    for bad in (math.nan, math.inf):
        broken = q.clone()
        broken[0, 17, 1, 3] = bad
        with pytest.raises(InputError, match="step 1: NaN or infinity in the scores"):
            session.attend(1, 0, broken, k, v)
    fresh = GsrsSession((1, 3), (0.9, 0.7), steps=5, **OPTIONS)
    fresh.attend(0, 0, *inputs(0))
    for step in range(1, 5):  # goes on as if nothing had happened
        assert torch.equal(
            session.attend(step, 0, *inputs(step)), fresh.attend(step, 0, *inputs(step))
        )
    with pytest.raises(InputError, match=r"another run begins with reset\(\)"):
        session.attend(5, 0, *inputs(0))
    session.reset()
    assert session.statistics.searched == 0
    session.attend(0, 0, *(x[:, :40] for x in inputs(0)))  # another shape, too


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", SESSIONS)
def test_nan_and_infinity_stay_seen(name, check):
    """At every kind of step: NaN where attention to everything has it, or a refusal."""
    own = {"threshold": -1.0, "warmup": 1} if name == "liteattention" else {"search_steps": (1, 3)}
    own |= {"p": (0.6, 0.5)} if name == "gsrs" else {}
    inputs, bad = run_inputs(2), itertools.product("qkv", (math.nan, math.inf, -math.inf))
    for which, value in bad:
        session = make_session(name, steps=5, check_finite=check, **own, **OPTIONS)
        for step in range(5):
            broken = dict(zip("qkv", (x.clone() for x in inputs(step)), strict=True))
            broken[which][0, 29, 1, 3] = value
            q, k, v = (x.transpose(1, 2) for x in broken.values())
            dense = torch.softmax(q @ k.mT / 4, -1) @ v
            beside = copy.copy(session)
            beside._states, beside._tally = dict(session._states), copy.deepcopy(session._tally)
            searches = session.rule.action(step) == "search"
            if check and searches and which != "v" and value is math.nan:
                with pytest.raises(InputError, match="NaN or infinity in the scores"):
                    beside.attend(step, 0, *broken.values())
            else:
                with contextlib.suppress(InputError) if check else contextlib.nullcontext():
                    out = beside.attend(step, 0, *broken.values()).transpose(1, 2)
                    assert out[dense.isnan()].isnan().all(), (which, value, step)
                    assert out[:, 0].isfinite().all()
                    if which == "q":
                        assert torch.equal(out.isnan(), dense.isnan())
            if not check and step < 4 and searches and which != "v":
                fine = inputs(step + 1)
                q, k, v = (x.transpose(1, 2) for x in fine)
                wanted = torch.softmax(q @ k.mT / 4, -1) @ v
                after = beside.attend(step + 1, 0, *fine).transpose(1, 2)
                torch.testing.assert_close(after, wanted)  # no block was known to matter less
            session.attend(step, 0, *inputs(step))


def test_lengths_and_backends_are_checked_at_the_first_step():
    inputs = run_inputs(8)
    session = GsrsSession(grid=(2, 4, 5), **OPTIONS)
    with pytest.raises(InputError, match="grid 2x4x5 has 40 tokens"):
        session.attend(0, 0, *inputs(0))
    with pytest.raises(MissingCapabilityError, match="backend='reference'"):
        GsrsSession(profile="h200").attend(0, 0, *inputs(0))
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no device profile"):
            GsrsSession(backend="reference").attend(0, 0, *inputs(0))


# --- AdaSpa ----------------------------------------------------------------------------------


def test_adaspa_divides_by_the_first_log_sum_exp():
    inputs = run_inputs(9)
    session = AdaSpaSession((1, 3), 0.6, steps=5, head_adaptive=False, dense_text=False, **OPTIONS)
    masks = {}
    for step in range(5):
        session.attend(step, 0, *inputs(step))
        if step in (1, 3):
            masks[step] = session.mask(0)[0]
    everything = np.ones((6, 8), bool)
    for h in range(2):
        q, k, v = (x[0, :, h].numpy() for x in inputs(1))
        _, cached = oracle.attend(q, k, v, everything, BLOCK)
        for step in (1, 3):
            q, k, v = (x[0, :, h].numpy() for x in inputs(step))
            scores = oracle.weights(q, k, everything, BLOCK, cached)
            drift = np.exp(oracle.attend(q, k, v, everything, BLOCK)[1] - cached)
            blocks = drift.reshape(6, 8).mean(1)
            np.testing.assert_allclose(scores.sum(1), blocks)  # rows sum to the drift, not to 1
            assert (abs(blocks - 1) > 0.1).any() == (step == 3)
            for u in range(6):
                assert np.array_equal(masks[step][h, u].numpy(), oracle.top_k(scores[u], 3))
    assert (masks[1].sum(-1) == 3).all()  # round(0.4 · 8) in every row


def test_adaspa_says_when_scores_outgrow_the_first_search():
    q, k, v = run_inputs(9)(0)
    for cached in (True, False):
        session = AdaSpaSession((0, 1), 0.6, steps=3, cached_lse=cached, **OPTIONS)
        session.attend(0, 0, q, k, v)
        if cached:
            with pytest.raises(InputError, match="far above those of the first search"):
                session.attend(1, 0, 100 * q, k, v)
        else:
            session.attend(1, 0, 100 * q, k, v)


def test_adaspa_gives_blocks_from_heads_that_keep_much_to_heads_that_keep_little():
    # Ten blocks a row, s = 0.8: two are kept. Heads hold 1, .9, .5, .4 and .3 in their top two.
    held = torch.tensor([0.4, 1.0, 0.3, 0.9, 0.5])
    weights = torch.cat(
        [(held / 2)[:, None].expand(5, 2), ((1 - held) / 8)[:, None].expand(5, 8)], 1
    )
    weights = weights[None, :, None].expand(1, 5, 3, 10)
    # Two heads above 0.8: they get (1 - s) / 2, the two of lowest recall 3 (1 - s) / 2.
    assert adaspa.head_budgets(weights, 0.8).tolist() == [[3, 1, 3, 1, 2]]
    # A head is never both: at most half of them are good.
    sure = torch.zeros(1, 3, 4, 10)
    sure[..., 0] = 1
    assert sorted(adaspa.head_budgets(sure, 0.8)[0].tolist()) == [1, 2, 3]
    # Sums that aren't 1 (a cached log-sum-exp) don't change a head's recall.
    assert torch.equal(adaspa.head_budgets(weights * 3, 0.8), adaspa.head_budgets(weights, 0.8))


def test_adaspa_keeps_text():
    inputs = run_inputs(6, tokens=53)
    session = AdaSpaSession((0,), 0.8, steps=2, grid=GRID, text_tokens=5, **OPTIONS)
    session.attend(0, 0, *inputs(0))
    assert session.mask(0)[..., 6:, :].all()
    assert session.mask(0)[..., 8:].all()


# --- LiteAttention ---------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "threshold"), [(48, -2.0), (53, -1.0), (6, -1.0)])
def test_lite_attention_is_the_slow_one(tokens, threshold):
    inputs = run_inputs(10, tokens=tokens)
    session = LiteAttentionSession(threshold, steps=5, **OPTIONS)
    seen, outs = [None], []
    for step in range(5):
        outs.append(session.attend(step, 0, *inputs(step)))
        seen.append(session.mask(0)[0])
    for h in range(2):

        def one(step, h=h):
            return [x[0, :, h].numpy() for x in inputs(step)]

        masks, slow = oracle.lite_attention(5, threshold, one, BLOCK)
        for step in range(5):
            np.testing.assert_allclose(outs[step][0, :, h].numpy(), slow[step], atol=2e-5)
            if step:
                assert np.array_equal(seen[step][h].numpy(), masks[step])
    for before, after in itertools.pairwise(seen[1:]):
        assert not (after & ~before).any()  # what is skipped stays skipped
    if tokens > 8:
        assert not seen[-1].all()
    assert seen[-1].any(-1).all()  # and no row is ever left without a tile


def test_lite_attention_marks_by_the_order_of_the_walk():
    """The first tile that is visited, the last of the sequence, is never marked."""
    maxima = torch.tensor([[-30.0, 5.0, -30.0, 0.0]])
    visited = torch.ones(1, 4, dtype=torch.bool)
    needed = liteattention.still_needed(maxima, visited, -10.0)
    assert needed.tolist() == [False, True, False, True]
    # Where that tile isn't visited, the next one is the first.
    visited[0, 3] = False
    needed = liteattention.still_needed(maxima, visited, -10.0)
    assert needed.tolist() == [False, True, True, False]
    # One row that needs a tile is enough.
    two = torch.cat([maxima, torch.zeros(1, 4)])
    assert liteattention.still_needed(two, torch.ones(1, 4, dtype=torch.bool), -10.0).all()


def test_every_session_goes_through_a_made_trajectory():
    source = synthetic_qk(GRID, 2, 16, seed=1)
    made = NoisyTrajectory(source, 6, seed=2)
    for name in SESSIONS:
        own = {"threshold": -0.5} if name == "liteattention" else {"search_steps": (1, 3)}
        if name == "gsrs":
            own["p"] = (0.9, 0.7)
        session = make_session(name, steps=6, grid=GRID, **own, **OPTIONS)
        for step in range(6):
            pairs = [made.read(step, where) for where in made.places]
            q, k = (torch.stack(x, 1)[None] for x in zip(*pairs, strict=True))
            out = session.attend(step, 0, q, k, k)
            assert torch.isfinite(out).all()
        assert session.rule.name == name
        assert session.statistics.plans == (5 if name == "liteattention" else 2)
        assert 0 < session.statistics.searches[-1].density < 1


# --- what lies underneath --------------------------------------------------------------------


def test_packed_bits_and_copied_lists():
    keep = torch.rand(2, 3, 4, 13) < 0.4
    assert torch.equal(mask_from_packed(pack(keep), 13), keep)
    planner = Planner((6, 4, 13), "cpu", wave=5)
    schedule = planner(keep, "lockstep")
    longest = int(keep.sum(-1).max())
    copy = own_copy(schedule, longest)
    want = schedule.to_schedule()
    order = want.row_order.copy()
    planner(~keep, "original")  # the planner's own buffers are someone else's now
    have = copy.to_schedule()
    assert copy.indices.shape[-1] == longest
    assert np.array_equal(want.indices, have.indices)
    assert np.array_equal(order, have.row_order)
    assert copy.starts.tolist() == [longest * i for i in range(24)]


def test_a_search_may_read_its_candidates_in_order():
    q, k, v = run_inputs(11)(0)
    keep = torch.rand(1, 2, 6, 8) < 0.5
    schedule = Planner((2, 6, 8), "cpu", wave=4)(keep, "lockstep")
    plain = attend_with_importance(q, k, v, block=BLOCK, candidates=keep)
    ordered = attend_with_importance(q, k, v, block=BLOCK, schedule=schedule)
    torch.testing.assert_close(plain.weights, ordered.weights)


def test_a_session_under_a_transformer():
    pytest.importorskip("diffusers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tiny_transformers import forward, wan

        from wavealign.integrations import diffusers as integration
        from wavealign.integrations import diffusers_sessions as sessions

    model, inputs = wan()
    times = (900, 700, 500, 300)

    def at(time):
        return {**inputs, "timestep": torch.full_like(inputs["timestep"], time)}

    dense = [forward(model, at(time)) for time in times]
    options = {**OPTIONS, "search_steps": (1, 2), "p": (1.0, 1.0)}
    sessions.enable_session(model, "gsrs", steps=4, **options)
    with pytest.raises(InputError, match="wasn't called yet"):
        sessions.session_of(model)
    for _ in range(2):  # a higher timestep is another run
        for time, wanted in zip(times, dense, strict=True):
            for _ in range(2):  # guidance: conditional, unconditional
                torch.testing.assert_close(forward(model, at(time)), wanted, atol=1e-5, rtol=1e-4)
    session = sessions.session_of(model)
    assert session.token_order == "hilbert"
    found = session.statistics
    assert (found.full, found.searched, found.reused) == (4, 8, 4)  # two layers, two branches
    assert {r.branch for r in found.searches} == {"cond", "uncond"}
    sessions.restart(model)
    torch.testing.assert_close(forward(model, at(300)), dense[-1])
    assert sessions.session_of(model).statistics.full == 2
    with pytest.raises(InputError, match="enabled already"):
        sessions.enable_session(model, "gsrs")
    integration.disable(model)
    assert torch.equal(forward(model, at(300)), dense[-1])
    with pytest.raises(InputError, match="runs no session"):
        sessions.session_of(model)
    for name in SESSIONS:
        with pytest.raises(InputError, match="enable_session"):
            integration.enable(model, name)
    with pytest.raises(InputError, match="Did you mean 'adaspa'"):
        sessions.enable_session(model, "adaspaa")
    for wrong in ({"order": "hilbrt"}, {"grid": (2, 4, 6)}, {"text_tokens": 3}):
        with pytest.raises(InputError, match=r"Did you mean 'hilbert'|the model says it"):
            sessions.enable_session(model, "gsrs", steps=4, **{**options, **wrong})
    with pytest.raises(InputError, match="isn't enabled"):
        integration.disable(model)


def test_steps_under_a_transformer_that_cannot_be_counted():
    pytest.importorskip("diffusers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tiny_transformers import forward, wan

        from wavealign.integrations import diffusers_sessions as sessions

    model, inputs = wan()
    options = {**OPTIONS, "search_steps": (1, 2), "p": (0.9, 0.8)}
    sessions.enable_session(model, "gsrs", steps=3, **options)

    def call(at, time):
        timestep = torch.full_like(inputs["timestep"], time)
        return forward(at, {**inputs, "timestep": timestep})

    def broken(*_):
        raise KeyboardInterrupt

    def break_off(at, time):
        hook = at.blocks[1].register_forward_pre_hook(broken)
        with pytest.raises(KeyboardInterrupt):
            call(at, time)
        hook.remove()

    break_off(model, 900)  # the first call of a run can be made again
    for time in (900, 900, 700):
        call(model, time)
    other = copy.deepcopy(model)
    for each in (model, other):
        assert sessions.session_of(each).statistics.searched == 2
        call(each, 700)
        with pytest.raises(InputError, match="call 3 of the transformer at timestep 700, step 1"):
            call(each, 700)
        break_off(each, 500)
        with pytest.raises(InputError, match=r"at timestep 500, was broken off.*restart"):
            call(each, 500)
        sessions.restart(each)
        for time in (900, 700, 500):
            call(each, time)
        with pytest.raises(InputError, match="timestep 300 is step 3 of a run of 3 steps"):
            call(each, 300)
        assert sessions.session_of(each).statistics.searched == 4


def test_tokens_that_are_given_have_no_timestep():
    """Image to video: the first frame's timestep is 0 at every step."""
    pytest.importorskip("diffusers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tiny_transformers import forward, wan

        from wavealign.integrations import diffusers_sessions as sessions

    model, inputs = wan()
    sessions.enable_session(model, "gsrs", steps=2, search_steps=(1,), p=(0.9,), **OPTIONS)
    frames, height, width = inputs["hidden_states"].shape[2:]
    timesteps = torch.zeros(2, frames * height * width // 4)
    for time in (900, 500):
        timesteps[:, height * width // 4 :] = time
        forward(model, {**inputs, "timestep": timesteps})
    assert sessions.session_of(model).statistics.searched == 2
