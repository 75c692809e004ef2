"""Sessions on a GPU, in bf16 and fp16, step by step against the same session in float32 on the CPU.

The comparison also runs with both on the CPU, so that its code is known to work where no GPU is.
"""

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="importance_cases also checks the Triton kernels")

from helpers import nothing_waits  # noqa: E402
from importance_cases import OUT_FRAC, W_FRAC, unexplained_blocks  # noqa: E402

from wavealign.errors import InputError  # noqa: E402
from wavealign.gpu.importance.attend import attend_with_importance  # noqa: E402
from wavealign.methods.select import select_top_p  # noqa: E402
from wavealign.qk import TokenGrid, token_order  # noqa: E402
from wavealign.qk.trajectory import NoisyTrajectory, synthetic_qk  # noqa: E402
from wavealign.sessions import SESSIONS, make_session  # noqa: E402

GRID = TokenGrid(3, 13, 26)  # 1,014 tokens: ragged blocks
STEPS, SEARCH, SHARES = 8, (1, 3, 5), (0.95, 0.85, 0.7)
HEADS = 3
CPU_OR_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_another_card = pytest.mark.filterwarnings("ignore:planning by profile")


def options(name, device, block=64, **more):
    own = {"search_steps": SEARCH, "policy": "lockstep"}
    if name == "gsrs":
        own["p"] = SHARES
    if name == "liteattention":
        own = {"threshold": -0.7, "policy": "lockstep"}
    return {
        "block": (block, block), "steps": STEPS, "grid": GRID, "profile": "h200",
        "backend": "reference" if device == "cpu" else "auto", **own, **more,
    }  # fmt: skip


class Inputs:
    """Q, K and V ``[1, L, H, D]`` of each step: low precision on a device, and its float32 self."""

    def __init__(self, head_dim, dtype, device, seed=0):
        made = NoisyTrajectory(synthetic_qk(GRID, HEADS, head_dim, seed), STEPS, seed)
        rng = torch.Generator().manual_seed(seed)
        values = torch.randn(1, GRID.tokens, HEADS, head_dim, generator=rng)
        self._low = []
        for step in range(STEPS):
            pairs = [made.read(step, place) for place in made.places]
            q, k = (torch.stack(x, 1)[None] for x in zip(*pairs, strict=True))
            self._low.append([x.to(dtype).to(device) for x in (1.5 * q, k, values)])

    def low(self, step):
        return self._low[step]

    def exact(self, step):
        return [x.cpu().float() for x in self._low[step]]


def attention(qkv, keep, block):
    """Float32 on the CPU over the blocks that are kept, everything in the Hilbert order."""
    order = torch.from_numpy(token_order("hilbert", GRID))
    q, k, v = (x[0, order].transpose(0, 1) for x in qkv)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if keep is not None:
        seen = keep[0].cpu().repeat_interleave(block, 1).repeat_interleave(block, 2)
        scores.masked_fill_(~seen[:, : GRID.tokens, : GRID.tokens], -math.inf)
    out = torch.empty_like(q)
    out[:, order] = scores.softmax(-1) @ v
    return out.transpose(0, 1)[None]


def check_selection(name, keep, qkv, among, step, block, first_lse):
    """A search's mask by float32 weights, but for ties. The candidates are the session's own."""
    order = torch.from_numpy(token_order("hilbert", GRID))
    q, k, v = (x[:, order] for x in qkv)
    found = attend_with_importance(
        q, k, v, block=(block, block), candidates=among, kernel="torch",
        reference_lse=first_lse if name == "adaspa" else None,
    )  # fmt: skip
    weights = found.weights.double()
    if name == "gsrs":
        share = SHARES[SEARCH.index(step)]
        right = select_top_p(weights, share, among)
        assert unexplained_blocks(keep, right, weights, share) == ""
    else:
        # Which blocks a row keeps, given how many: none that is lighter than one left out.
        lightest = weights.masked_fill(~keep, math.inf).amin(-1)
        heaviest = weights.masked_fill(keep, 0).amax(-1)
        assert (heaviest <= lightest * (1 + 2 * W_FRAC)).all()
    return found.lse


CASES = [
    (64, torch.bfloat16, 64, "lockstep"),
    (128, torch.float16, 128, "auto"),
    (128, torch.bfloat16, 128, "resync"),
    (64, torch.float16, 128, "original"),
    (128, torch.float16, 64, "auto"),
]


@on_another_card
@pytest.mark.parametrize(
    ("head_dim", "dtype", "block", "policy", "device"),
    [(*case, "cpu") for case in CASES[:2]]
    + [pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in CASES],
)
@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_is_that_of_the_cpu(name, head_dim, dtype, block, policy, device):
    inputs = Inputs(head_dim, dtype, device)
    here = make_session(name, **options(name, device, block, policy=policy))
    there = make_session(name, **options(name, "cpu", block, policy=policy))
    keep = first = first_lse = None
    for step in range(STEPS):
        action = here.rule.action(step)
        qkv = inputs.exact(step)
        out = here.attend(step, 0, *inputs.low(step))
        there.attend(step, 0, *qkv)
        assert out.device.type == device
        assert out.dtype == dtype
        among = first if name == "gsrs" and action == "search" else None
        attended = {"full": None, "search": among, "reuse": keep}[action]
        if name == "liteattention":
            attended = keep
        wanted = attention(qkv, attended, block)
        error = (out.cpu().float() - wanted).norm() / wanted.norm()
        assert error < OUT_FRAC[dtype], f"step {step}, {action}"
        if action == "search":
            keep = here.mask(0).cpu()
            if name != "liteattention":
                lse = check_selection(name, keep, qkv, among, step, block, first_lse)
                first_lse = lse if first_lse is None else first_lse
            first = keep if first is None else first
            slow = there.mask(0)
            # Searches build on each other, so a tie that fell otherwise may have a few followers.
            assert (keep != slow).float().mean() < 5e-3
            if name in ("adaspa", "topk"):
                assert torch.equal(keep.sum(-1), slow.sum(-1))
    assert not keep.all()
    mine, its = here.statistics, there.statistics
    assert (mine.full, mine.searched, mine.reused, mine.plans) == (
        its.full, its.searched, its.reused, its.plans,
    )  # fmt: skip
    for a, b in zip(mine.searches, its.searches, strict=True):
        assert a.density == pytest.approx(b.density, abs=5e-3)
        assert a.evaluated == pytest.approx(b.evaluated, abs=5e-3)
    kinds = {"searched", "planned", "reused"} | ({"full"} if mine.full else set())
    assert {kind for kind, seconds in mine.seconds.items() if seconds > 0} == kinds
    # Launches this short aren't looked at, head by head.
    assert len(here.explain().splitlines()) == (1 if policy == "auto" else HEADS)


@pytest.mark.parametrize("device", CPU_OR_GPU)
def test_branches_and_layers_never_mix(device):
    runs = {
        place: Inputs(64, torch.bfloat16, device, seed)
        for seed, place in enumerate([(0, "cond"), (0, "uncond"), (5, "cond")])
    }
    together = make_session("gsrs", **options("gsrs", device, 128))
    alone = {place: make_session("gsrs", **options("gsrs", device, 128)) for place in runs}
    for step in range(STEPS):
        for (layer, branch), inputs in runs.items():
            out = together.attend(step, layer, *inputs.low(step), branch)
            own = alone[layer, branch].attend(step, layer, *inputs.low(step), branch)
            assert torch.equal(out, own), (step, layer, branch)
            if step >= SEARCH[0]:
                mask = together.mask(layer, branch)
                assert torch.equal(mask, alone[layer, branch].mask(layer, branch))
    masks = [together.mask(layer, branch) for layer, branch in runs]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(masks, 2))
    assert together.statistics.plans == 9


@pytest.mark.parametrize("device", CPU_OR_GPU)
@pytest.mark.parametrize("name", SESSIONS)
def test_nan_is_refused_and_the_run_goes_on(name, device):
    inputs = Inputs(64, torch.bfloat16, device)
    session, fresh = (make_session(name, **options(name, device, 128)) for _ in range(2))
    for step in range(STEPS):
        if session.rule.action(step) == "search":
            for bad, which in ((math.nan, 0), (math.nan, 1), (math.inf, 0)):
                broken = [x.clone() for x in inputs.low(step)]
                broken[which][0, 700, 1, 3] = bad
                with pytest.raises(InputError, match=f"step {step}: NaN or infinity"):
                    session.attend(step, 0, *broken)
        out = session.attend(step, 0, *inputs.low(step))
        assert torch.equal(out, fresh.attend(step, 0, *inputs.low(step)))
    assert session.statistics.searched == fresh.statistics.searched


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["original", "lockstep", "resync"])
@pytest.mark.parametrize("name", SESSIONS)
def test_nothing_waits_without_the_look_and_with_a_named_policy(name, policy):
    inputs = Inputs(128, torch.bfloat16, "cuda")
    session = make_session(
        name, **options(name, "cuda", 128, policy=policy, check_finite=False)
    )  # fmt: skip
    for step in range(STEPS):  # compiles, and makes what is made once
        session.attend(step, 0, *inputs.low(step))
    with nothing_waits():
        # Another branch goes through every kind of step of its own.
        outs = [session.attend(step, 0, *inputs.low(step), "uncond") for step in range(STEPS)]
    assert all(torch.isfinite(out).all() for out in outs)
    assert torch.equal(session.mask(0), session.mask(0, "uncond"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SESSIONS)
def test_memory_does_not_grow(name):
    inputs = Inputs(128, torch.bfloat16, "cuda")
    session = make_session(name, **options(name, "cuda", 128))
    runs = []
    for run in range(3):
        session.reset()
        used = []
        for step in range(STEPS):
            session.attend(step, 0, *inputs.low(step))
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
        runs.append(used)
        actions = [session.rule.action(step) for step in range(STEPS)]
        for step in range(1, STEPS):
            if run and actions[step] == "reuse":
                assert used[step] == used[step - 1], f"step {step}"
    # The first run makes buffers that stay; later ones find them.
    assert max(np.abs(np.subtract(runs[2], runs[1]))) <= 4096


@pytest.mark.gpu
def test_a_run_is_the_same_each_time():
    inputs = Inputs(64, torch.float16, "cuda")
    session = make_session("gsrs", **options("gsrs", "cuda"))
    first = [session.attend(step, 0, *inputs.low(step)) for step in range(STEPS)]
    session.reset()
    again = [session.attend(step, 0, *inputs.low(step)) for step in range(STEPS)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
