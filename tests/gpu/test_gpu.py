"""Every backend on a real GPU: the same attention, exact moves, counters that add up."""

import dataclasses
import json
import subprocess

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import PROGRAM, random_mask

from wavealign.cli import main
from wavealign.gpu.registry import BACKEND_NAMES
from wavealign.masks import BlockMask, save_mask
from wavealign.order import build_schedule

# Deprecations in other people's compilers are theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BACKENDS = [name for name in BACKEND_NAMES if name not in ("reference", "flashinfer")]
POLICIES = ("original", "svd", "nnz-wave", "svd+nnz", "lockstep")


def usable(name):
    from wavealign.gpu.registry import backends

    backend = next(b for b in backends() if b.name == name)
    if reason := backend.missing():
        pytest.skip(f"{name}: {reason}")
    return backend


def sparse_mask(H=2, M=9, N=11, block=(128, 128), short=(0, 0), density=0.4, seed=0, empty=()):
    """A random mask whose last blocks are `short` tokens shorter, with some rows emptied."""
    rng = np.random.default_rng(seed)
    kept = rng.random((H, M, N)) < density
    kept[:, :, 0] |= ~kept.any(2)
    kept[:, -1, -1] = True  # the ragged K/V block is used, not first
    kept[:, -1, 0] = True
    for h, i in empty:
        kept[h, i] = False
    tokens = (M * block[0] - short[0], N * block[1] - short[1])
    return BlockMask.from_dense(kept, block, tokens)


CASES = {
    "plain": {},
    "ragged": {"short": (37, 51)},
    "ragged by a tile": {"short": (5, 100)},
    "empty rows": {"empty": ((0, 3), (1, 8), (1, 0))},
    "64x128": {"block": (64, 128), "short": (10, 3)},
    "128x64": {"block": (128, 64), "short": (10, 3)},
    "64x64": {"block": (64, 64), "short": (0, 3)},
}


@pytest.mark.parametrize("shape", ["mha", "batch", "gqa", "fp16", "d64"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BACKENDS)
def test_backends_compute_block_sparse_attention(name, case, shape):
    from wavealign.gpu.correctness import check_launch, check_poke
    from wavealign.gpu.execution import Execution
    from wavealign.gpu.inputs import Inputs
    from wavealign.gpu.reference import reference_attention
    from wavealign.gpu.sizes import Sizes

    backend = usable(name)
    mask = sparse_mask(**CASES[case], **({"H": 4} if shape == "gqa" else {}))
    sizes = Sizes.of(
        mask,
        **{"batch": {"batch": 2}, "gqa": {"kv_heads": 2}, "fp16": {"dtype": "fp16"},
           "d64": {"head_dim": 64}}.get(shape, {}),
    )  # fmt: skip
    import torch

    if reason := backend.capabilities.refusal(sizes, torch.cuda.get_device_capability()):
        pytest.skip(f"{name} {reason}")
    inputs = Inputs.random(sizes, "cuda", seed=1)
    reference = reference_attention(mask, inputs)
    for policy in POLICIES if shape == "mha" else ("svd+nnz",):
        schedule = build_schedule(mask, policy, wave=4)
        launch = Execution.of(backend, sizes, schedule, inputs)
        check_launch(launch, reference, f"{name} {case} {policy}")
        check_poke(launch, mask, f"{name} {case} {policy}")


@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
def test_flex_compiles_more_shapes_than_torch_does_by_default():
    from wavealign.gpu.correctness import check_launch
    from wavealign.gpu.execution import Execution
    from wavealign.gpu.inputs import Inputs
    from wavealign.gpu.reference import reference_attention
    from wavealign.gpu.sizes import Sizes

    backend = usable("flex")
    for N in range(3, 14):  # torch: eight
        mask = sparse_mask(H=1, M=2, N=N)
        sizes = Sizes.of(mask)
        inputs = Inputs.random(sizes, "cuda")
        schedule = build_schedule(mask, "original", wave=4)
        launch = Execution.of(backend, sizes, schedule, inputs)
        check_launch(launch, reference_attention(mask, inputs), f"{N} blocks")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "lies", ["rows of 130", "off by 2 bytes", "a batch of stride 1", "expanded"]
)
def test_tensors_may_lie_as_they_like(name, lies):
    """Tensor descriptors take addresses and strides of 16 bytes; K of others is copied."""
    import torch

    import wavealign
    from wavealign.gpu.importance import attend_with_importance

    block = usable(name).capabilities.blocks[0]
    q, k, v = torch.randn(3, 1, 256, 2, 128, device="cuda").bfloat16()
    if lies == "rows of 130":
        there = torch.nn.functional.pad(k, (0, 2))[..., :128]
    elif lies == "off by 2 bytes":
        there = torch.nn.functional.pad(k.flatten(), (1, 0))[1:].view(k.shape)
    elif lies == "a batch of stride 1":
        there = k.as_strided(k.shape, (1, *k.stride()[1:]))
    else:
        there = k = k[:, :, :1].expand(k.shape)
    bits = torch.ones(2, *(256 // n for n in block), dtype=torch.bool, device="cuda").tril()
    options = {"backend": name, "policy": "nnz", "layout": "bshd", "block": block}
    wanted = wavealign.attend(q, k.contiguous(), v, bits, **options)
    assert torch.equal(wavealign.attend(q, there, v, bits, **options), wanted)
    wanted = attend_with_importance(q, k.contiguous(), v, candidates=bits, block=block)
    found = attend_with_importance(q, there, v, candidates=bits, block=block)
    assert torch.equal(found.out, wanted.out)
    assert torch.equal(found.weights, wanted.weights)


@pytest.mark.parametrize("name", BACKENDS)
def test_kernels_run_on_the_device_of_their_tensors(name):
    import torch

    import wavealign
    from wavealign.gpu.importance import attend_with_importance

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs; tests/gpu/test_launch_sites.py reads the source")
    block, outs = usable(name).capabilities.blocks[0], []
    for device in ("cuda:0", "cuda:1"):
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, 2, 256, 128, generator=generator).bfloat16().to(device)
        bits = torch.ones(2, *(256 // n for n in block), dtype=torch.bool, device=device).tril()
        site = wavealign.Attention(policy="nnz", backend=name, block=block)
        out = site(q, k, v, bits), *vars(attend_with_importance(q, k, v)).values()
        outs.append([t.cpu() for t in out if t is not None])
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))


def test_the_checks_notice_a_wrong_kernel():
    """Lists with a block exchanged for another are caught by the reference and by the poke."""
    import torch

    from wavealign.gpu.correctness import WrongResultError, check_launch
    from wavealign.gpu.execution import Execution
    from wavealign.gpu.inputs import Inputs
    from wavealign.gpu.reference import reference_attention
    from wavealign.gpu.sizes import Sizes

    backend = usable("triton")
    mask = sparse_mask(H=1, M=3, N=6, density=0.4)
    sizes = Sizes.of(mask)
    inputs = Inputs.random(sizes, "cuda")
    reference = reference_attention(mask, inputs)
    right = build_schedule(mask, "original", wave=4)
    wrong = dataclasses.replace(right, indices=(right.indices + 1) % mask.N)
    with pytest.raises(WrongResultError, match="relative error"):
        check_launch(Execution.of(backend, sizes, wrong, inputs), reference, "shifted")
    assert torch.isfinite(reference[0]).all()


def test_moves_on_the_gpu_equal_moves_on_the_cpu():
    import torch

    from wavealign.gpu.move import gather_blocks, scatter_blocks

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5 * 64 - 9, 3, 96, generator=generator)
    order = torch.stack([torch.randperm(5, generator=generator) for _ in range(3)]).int()
    moved, back = torch.empty(2, 320, 3, 96), torch.empty_like(q)
    gather_blocks(q, order, 64, moved)
    on_gpu = torch.full_like(moved, float("nan"), device="cuda")
    gather_blocks(q.cuda(), order.cuda(), 64, on_gpu)
    assert torch.equal(on_gpu.cpu(), moved)
    scatter_blocks(on_gpu, order.cuda(), 64, out := torch.full_like(q, float("nan"), device="cuda"))
    scatter_blocks(moved, order, 64, back)
    assert torch.equal(out.cpu(), q)
    assert torch.equal(back, q)


def test_a_trace_shows_rows_starting_in_launch_order():
    from wavealign.gpu.sizes import Sizes
    from wavealign.gpu.trace import record_trace

    backend = usable("triton")
    mask = sparse_mask(H=2, M=300, N=64, density=0.3)
    schedule = build_schedule(mask, "svd+nnz", wave=132)
    trace = record_trace(backend, Sizes.of(mask), schedule)
    assert trace.shape == (600, 4)
    assert (trace[:, 1] > trace[:, 0]).all()
    assert np.array_equal(trace[:, 3], schedule.row_order.ravel())
    rank = np.argsort(np.argsort(trace[:, 0], kind="stable"))
    assert np.abs(rank - np.arange(600)).max() <= 2 * 132


def run_validate(tmp_path, *arguments):
    mask = random_mask(0, (1, 300, 300), 0.3)
    save_mask(tmp_path / "m.npz", mask)
    out = tmp_path / "runs.jsonl"
    result = CliRunner().invoke(
        main,
        ["validate", "--gpu", "--mask", str(tmp_path / "m.npz"), "--out", str(out), *arguments],
    )
    assert result.exit_code == 0, result.output
    return result.output, [json.loads(line) for line in out.read_text().splitlines()]


def test_validate_measures_and_predicts(tmp_path):
    output, rows = run_validate(
        tmp_path, "--backend", "triton", "--regime", "single", "--regime", "steady",
        "--seconds", "0.5",
    )  # fmt: skip
    assert len(rows) == 2 * 6  # the policies it takes by default, in two regimes
    assert {row["regime"] for row in rows} == {"single", "steady"}
    for row in rows:
        assert row["source"] == "measured"
        assert row["time_ms"] > 0
        assert row["limit_ms"] > 0
        assert row["error_frac"] < 1e-2
    assert "lockstep" in output


def test_counters_agree_with_what_is_known(tmp_path):
    doctor = subprocess.run(
        [*PROGRAM, "doctor", "--probe", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    ncu = next(c for c in json.loads(doctor.stdout)["checks"] if c["component"].startswith("ncu"))
    if ncu["state"] != "ok":
        pytest.skip(f"ncu: {ncu['detail']}")
    _, rows = run_validate(tmp_path, "--backend", "triton", "--counters", "--policy", "original")
    row = rows[0]
    blocks_bytes = row["kv_block_bytes"] * random_mask(0, (1, 300, 300), 0.3).nnz
    assert row["l2_requested_bytes"] == pytest.approx(blocks_bytes, rel=0.15)
    # 300 K/V blocks of 64 KiB fit L2: each is read once, and Q with it.
    assert row["hbm_read_bytes"] == pytest.approx(row["compulsory_bytes"] * 1.5, rel=0.2)
    assert row["l2_hit_frac"] > 0.95
