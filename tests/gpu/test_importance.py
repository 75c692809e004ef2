"""Attention with block importance: against float64, closed forms, and Triton against both."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import nothing_waits, run_interpreted
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="importance_cases also checks the Triton kernels")

from importance_cases import (  # noqa: E402
    CASES,
    differing_blocks,
    disagreement,
    reference_importance,
)

from wavealign.errors import InputError, MissingCapabilityError  # noqa: E402
from wavealign.gpu.importance import chunked  # noqa: E402
from wavealign.gpu.importance.attend import attend_with_importance  # noqa: E402
from wavealign.gpu.importance.launch import _parts  # noqa: E402
from wavealign.methods.exact import block_mass  # noqa: E402
from wavealign.planning import Planner  # noqa: E402


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_torch_path_equals_the_definition(data):
    def number(low, high):
        return data.draw(st.integers(low, high))

    B, kv_heads, group, D = number(1, 2), number(1, 2), number(1, 2), number(1, 5)
    tokens_q, tokens_kv = number(1, 30), number(1, 30)
    if data.draw(st.booleans()):
        tokens_kv = tokens_q
    block = (number(1, 9), number(1, 9))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    seed = number(0, 2**31)
    q = normal(B, tokens_q, kv_heads * group, D, seed=seed, dtype=dtype) * number(1, 4)
    k, v = (normal(B, tokens_kv, kv_heads, D, seed=seed + i, dtype=dtype) for i in (1, 2))
    M, N = math.ceil(tokens_q / block[0]), math.ceil(tokens_kv / block[1])
    candidates = reference_lse = positions = None
    if data.draw(st.booleans()):
        heads = data.draw(st.sampled_from([1, B])), kv_heads * group
        density = data.draw(st.sampled_from([0.0, 0.4, 0.8]))
        candidates = torch.rand(*heads, M, N) < density
    if data.draw(st.booleans()):
        reference_lse = normal(B, kv_heads * group, tokens_q, seed=seed + 3)
    if tokens_q == tokens_kv and data.draw(st.booleans()):
        positions = normal(tokens_q, number(1, 3), seed=seed + 4)
    options = {"candidates": candidates, "reference_lse": reference_lse, "positions": positions}
    every = number(1, 4)
    found = attend_with_importance(
        q, k, v, block=block, diagnostics=True, diagnose_every=every, **options
    )
    wanted = reference_importance(q, k, v, block, **options)
    left_out = torch.arange(tokens_q) // block[0] % every != 0
    wanted.entropy[..., left_out] = wanted.distance[..., left_out] = math.nan
    assert disagreement(found, wanted) == ""
    if reference_lse is None:
        sums = found.weights.double().sum(-1)
        holds = wanted.weights.sum(-1) > 0.5
        torch.testing.assert_close(sums, holds.double(), atol=1e-5, rtol=0)
        for share in (0.5, 0.8, 0.95, 1.0):
            assert differing_blocks(found.weights.double(), wanted.weights, share) == ""


def test_chunks_of_rows_change_nothing(monkeypatch):
    q, k, v = (normal(1, 130, 2, 8, seed=i) for i in range(3))
    whole = attend_with_importance(q, k, v, block=(16, 24), diagnostics=True)
    monkeypatch.setattr(chunked, "_SCORES_BYTES", {"cpu": 3 * 4 * 130 * 16})
    parts = attend_with_importance(q, k, v, block=(16, 24), diagnostics=True)
    for name in ("out", "lse", "weights", "entropy", "distance"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


def test_it_is_the_mass_of_the_exact_method():
    q, k, v = (normal(1, 100, 1, 8, seed=i) for i in range(3))
    found = attend_with_importance(q, k, v, block=(16, 32))
    torch.testing.assert_close(found.weights[0, 0], block_mass(q[0, :, 0], k[0, :, 0], 16, 32))


def test_uniform_attention():
    n, block = 50, 16
    q, k = torch.zeros(1, n, 1, 4), normal(1, n, 1, 4)
    found = attend_with_importance(q, k, k, block=(block, block), diagnostics=True)
    sizes = torch.tensor([16.0, 16.0, 16.0, 2.0]) / n
    torch.testing.assert_close(found.weights[0, 0], sizes.expand(4, 4))
    torch.testing.assert_close(found.entropy, torch.full((1, 1, n), math.log(n)))
    i = torch.arange(n)
    mean = (i[:, None] - i).abs().double().mean(-1)
    torch.testing.assert_close(found.distance[0, 0].double(), mean, atol=1e-4, rtol=0)


def test_a_single_key():
    q, k = normal(1, 1, 1, 4), normal(1, 1, 1, 4, seed=1)
    found = attend_with_importance(q, k, k, block=(4, 4), diagnostics=True)
    assert found.weights.item() == 1.0
    assert found.entropy.item() == found.distance.item() == 0.0
    torch.testing.assert_close(found.out, k)


def test_a_sharp_row_attends_to_itself():
    x = torch.eye(12)[None, :, None] * 30
    found = attend_with_importance(x, x, x, block=(4, 4), diagnostics=True)
    torch.testing.assert_close(found.weights[0, 0], torch.eye(3))
    assert found.entropy.abs().max() < 1e-6
    assert found.distance.abs().max() < 1e-6


def test_a_reference_lse_scales_what_it_normalises():
    q, k, v = (normal(2, 40, 2, 8, seed=i) for i in range(3))
    own = attend_with_importance(q, k, v, block=(8, 8))
    same = attend_with_importance(q, k, v, block=(8, 8), reference_lse=own.lse)
    torch.testing.assert_close(same.weights, own.weights)
    shifted = attend_with_importance(q, k, v, block=(8, 8), reference_lse=own.lse + 0.5)
    torch.testing.assert_close(shifted.weights, own.weights * math.exp(-0.5))
    torch.testing.assert_close(shifted.lse, own.lse)
    torch.testing.assert_close(shifted.out, own.out)
    # A row that had no key when its LSE was cached gives nothing, rather than infinity.
    empty = attend_with_importance(
        q, k, v, block=(8, 8), reference_lse=torch.full_like(own.lse, -math.inf)
    )
    assert not empty.weights.any()


def test_a_drifted_lse_can_turn_the_order_of_blocks():
    # Two queries, two one-key blocks: each query prefers its own by far, the second one less.
    k = torch.eye(2)[None, :, None]
    q = torch.tensor([[3.0, 0.0], [0.0, 4.0]])[None, :, None]
    own = attend_with_importance(q, k, k, block=(2, 1))
    drifted = own.lse + torch.tensor([0.0, 2.0])
    stale = attend_with_importance(q, k, k, block=(2, 1), reference_lse=drifted)
    assert own.weights[0, 0, 0].argmax() == 1
    assert stale.weights[0, 0, 0].argmax() == 0
    assert stale.weights.sum() < 0.6


@pytest.mark.parametrize("policy", ["original", "lockstep"])
def test_a_schedule_stands_for_its_candidates(policy):
    q, k, v = (normal(2, 60, 3, 8, seed=i) for i in range(3))
    candidates = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)) < 0.4
    schedule = Planner((6, 8, 8), "cpu", wave=3)(candidates, policy)
    by_mask = attend_with_importance(q, k, v, block=(8, 8), candidates=candidates)
    by_lists = attend_with_importance(q, k, v, block=(8, 8), schedule=schedule)
    torch.testing.assert_close(by_lists.weights, by_mask.weights)
    torch.testing.assert_close(by_lists.out, by_mask.out)


def test_a_sample_is_diagnosed_as_in_the_full_run(monkeypatch):
    q, k, v = (normal(2, 130, 2, 8, seed=i) for i in range(3))
    # Chunks that begin and end between sampled blocks.
    monkeypatch.setattr(chunked, "_SCORES_BYTES", {"cpu": 4 * 4 * 130 * 16})
    full = attend_with_importance(q, k, v, block=(16, 24), diagnostics=True)
    part = attend_with_importance(q, k, v, block=(16, 24), diagnostics=True, diagnose_every=3)
    sampled = torch.arange(130) // 16 % 3 == 0
    for name in ("entropy", "distance"):
        found, wanted = getattr(part, name), getattr(full, name)
        torch.testing.assert_close(found[..., sampled], wanted[..., sampled])
        assert found[..., ~sampled].isnan().all()
    torch.testing.assert_close(part.weights, full.weights, rtol=0, atol=0)


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**31))
def test_parts_of_a_table_keep_its_order(M, every, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.randperm(M, generator=generator) for _ in range(2)]).int()
    parts = _parts(table, every)
    assert [part.diagnosed for part in parts] == [True, False][: len(parts)]
    for h, rows in enumerate(table.tolist()):
        assert parts[0].table[h].tolist() == [u for u in rows if u % every == 0]
        if len(parts) == 2:
            assert parts[1].table[h].tolist() == [u for u in rows if u % every]
    assert sum(part.table.shape[1] for part in parts) == M


def test_views_are_taken_as_they_are():
    q, k, v = (normal(1, 2, 40, 8, seed=i).transpose(1, 2) for i in range(3))
    found = attend_with_importance(q, k, v, block=(8, 8))
    same = attend_with_importance(*(t.contiguous() for t in (q, k, v)), block=(8, 8))
    torch.testing.assert_close(found.out, same.out)
    assert found.out.is_contiguous()


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.tiles is None][::2], ids=lambda case: case.name
)
def test_the_torch_path_on_low_precision(case):
    assert case.check("cpu", "torch") == ""


def test_triton_kernels_equal_the_definition():
    assert run_interpreted("interpreted_importance.py") == "done"


def test_autocast_leaves_weights_alone():
    """Products in bfloat16 would make W of float32 inputs wrong in the third digit."""
    q, k, v = torch.randn(3, 1, 40, 2, 16)
    plain = attend_with_importance(q, k, v, block=(8, 8), diagnostics=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_with_importance(q, k, v, block=(8, 8), diagnostics=True)
    for name in ("out", "lse", "weights", "entropy", "distance"):
        assert torch.equal(getattr(found, name), getattr(plain, name)), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(8, 2, 4)}, r"q is \[8, 2, 4\]"),
        ({"q": torch.zeros(1, 8, 2, 4).int()}, "q is torch.int32"),
        ({"k": torch.zeros(1, 8, 2, 4).half()}, "k is torch.float16, q is torch.float32"),
        ({"k": torch.zeros(1, 9, 2, 4)}, "k and v differ"),
        ({"q": torch.zeros(1, 8, 3, 4)}, "K/V heads that divide"),
        ({"q": torch.zeros(1, 8, 2, 4, requires_grad=True)}, "no backward pass"),
        ({"block": (0, 4)}, "at least 1"),
        ({"block": (4.5, 4)}, "block: 4.5; expected a whole number"),
        ({"block": 4}, "expected a sequence"),
        ({"candidates": torch.ones(1, 2, 2, 3, dtype=torch.bool)}, r"expected \[1 or 1, 2, 2, 2\]"),
        ({"candidates": torch.ones(1, 2, 2, 2)}, "expected torch.bool"),
        ({"reference_lse": torch.zeros(2, 8)}, "expected \\[B, H, tokens\\]"),
        ({"positions": torch.zeros(7, 3)}, r"expected \[8, axes\]"),
        ({"positions": torch.zeros(8, 4)}, "4 axes"),
        ({"diagnostics": True, "diagnose_every": 0}, "expected at least 1"),
        ({"diagnostics": True, "diagnose_every": 0.5}, "a whole number"),
        ({"diagnose_every": 2}, "diagnose_every=2 without diagnostics"),
        ({"kernel": "cuda"}, "unknown kernel"),
        ({"kernel": "triton"}, "takes bfloat16 and float16, not float32; kernel='torch'"),
        ({"schedule": SimpleNamespace(counts=torch.zeros(1, 2))}, "the schedule is for"),
    ],
)
def test_bad_input(change, message):
    call = {name: torch.zeros(1, 8, 2, 4) for name in "qkv"} | {"block": (4, 4)} | change
    with pytest.raises(InputError, match=message):
        attend_with_importance(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_candidates_beside_a_schedule():
    x = torch.zeros(1, 8, 2, 4)
    candidates = torch.ones(2, 2, 2, dtype=torch.bool)
    schedule = Planner((2, 2, 2), "cpu", wave=1)(candidates, "original")
    with pytest.raises(InputError, match="one of them"):
        attend_with_importance(x, x, x, block=(4, 4), candidates=candidates, schedule=schedule)


def test_triton_without_a_gpu_says_so():
    x = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(MissingCapabilityError, match="needs q, k and v on an NVIDIA GPU"):
        attend_with_importance(x, x, x, kernel="triton")


def test_importing_it_leaves_torch_alone():
    code = "import sys, wavealign.gpu.importance.attend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton_on_a_gpu(case):
    if case.tiles is not None and case.tiles["tma"] and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no descriptors before Hopper")
    assert case.check("cuda", "triton") == ""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.tiles is None], ids=lambda case: case.name
)
def test_the_hopper_kernel(case):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper card")
    assert case.check("cuda", "hopper") == ""


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
@pytest.mark.parametrize(("density", "every"), [(None, 1), (0.3, 1), (None, 16), (0.3, 16)])
def test_many_tokens_on_a_gpu(density, every, kernel):
    if kernel == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper card")
    tokens, M = 20_010, 157
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, 2, 128, generator=generator, device="cuda").bfloat16()
        for _ in range(3)
    )
    candidates = None
    if density is not None:
        candidates = torch.rand(1, 2, M, M, generator=generator, device="cuda") < density
    options = {"candidates": candidates, "diagnostics": True, "diagnose_every": every}
    fast = attend_with_importance(q * 3, k, v, kernel=kernel, **options)
    slow = attend_with_importance(q * 3, k, v, kernel="torch", **options)
    slow = type(slow)(*(getattr(slow, name).cpu().double() for name in slow.__dataclass_fields__))
    assert disagreement(fast, slow) == ""
    for share in (0.8, 0.9, 0.95):
        assert differing_blocks(fast.weights.cpu().double(), slow.weights, share) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
def test_a_search_waits_for_nothing(kernel, every):
    if kernel == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper card")
    q, k, v = (torch.randn(1, 300, 2, 64, device="cuda").bfloat16() for _ in range(3))
    candidates = torch.rand(2, 3, 3, device="cuda") < 0.5
    options = {"candidates": candidates, "diagnostics": every > 1, "diagnose_every": every}
    attend_with_importance(q, k, v, kernel=kernel, **options)  # compiles
    with nothing_waits():
        attend_with_importance(q, k, v, kernel=kernel, **options)
