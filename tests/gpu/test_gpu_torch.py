"""What surrounds the kernels, on the CPU: moves, the reference, the checks, refusals, the CLI."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import ROOT, dense_attention, random_mask

from wavealign.cli import main
from wavealign.errors import InputError, MissingCapabilityError
from wavealign.gpu.capabilities import Capabilities
from wavealign.gpu.sizes import Sizes
from wavealign.masks import BlockMask, save_mask
from wavealign.order import build_schedule
from wavealign.planning import ListLayout

torch = pytest.importorskip("torch")


def ragged_launch(**changes):
    """A mask with short last blocks, an empty row, and the sizes of its launch."""
    rng = np.random.default_rng(3)
    kept = rng.random((4, 6, 5)) < 0.5
    kept[1, 2] = False
    mask = BlockMask.from_dense(kept, (8, 16), (45, 71))
    return mask, dataclasses.replace(Sizes.of(mask, head_dim=16), **changes)


def slow_backend(rows="gathered", walks="backwards", *, fault=None):
    """A backend on the CPU that follows its lists row by row; `fault` makes it wrong."""
    from wavealign.gpu.backend import Backend, BoundKernel

    class Slow(Backend):
        name = "slow"
        title = "numpy in disguise"
        needs = ()
        distribution = "slow"
        capabilities = Capabilities(
            blocks=((8, 16),),
            dtypes=("bf16",),
            head_dims=(16,),
            compute_capability=((0, 0), (99, 0)),
            layout=ListLayout(rows, walks, ragged_kv_first=True),
        )

        def bind(self, sizes, lists, inputs):
            q, k, v = inputs.q, inputs.k, inputs.v
            out = torch.empty_like(q)
            lse = torch.empty(q.shape[0], q.shape[2], q.shape[1])
            return BoundKernel(lambda: run(sizes, lists, q, k, v, out, lse), (out, lse))

    def run(sizes, lists, q, k, v, out, lse):
        for h in range(sizes.H):
            for i in range(sizes.M):
                place = i if lists.layout.rows == "gathered" else int(lists.table[h, i])
                rows_ = slice(place * sizes.block_q, min((place + 1) * sizes.block_q, q.shape[1]))
                blocks = lists.indices[h, place, : lists.counts[h, place]].tolist()
                if fault == "drops a block" and h == 0:
                    blocks = blocks[1:]
                if fault == "drops every block" and h == 0:
                    blocks = []
                if fault == "reads every block" and h == 0:
                    blocks = list(range(sizes.N))
                tokens = [
                    t
                    for b in blocks
                    for t in range(b * sizes.block_kv, (b + 1) * sizes.block_kv)
                    if t < sizes.tokens_kv
                ]
                if fault == "skips a row" and (h, i) == (0, 0):
                    continue
                keys, values = (t[:, tokens, h // sizes.heads_per_kv_head].float() for t in (k, v))
                scores = q[:, rows_, h].float() @ keys.transpose(1, 2) / sizes.head_dim**0.5
                lse[:, h, rows_] = scores.logsumexp(-1) if tokens else -torch.inf
                out[:, rows_, h] = (scores.softmax(-1) @ values).to(out.dtype) if tokens else 0
        return out, lse

    return Slow()


@pytest.mark.parametrize("block", [1, 7, 8])
def test_gather_and_scatter_are_inverse(block):
    from wavealign.gpu.move import gather_blocks, scatter_blocks, scatter_lse

    tokens, M = 37, -(-37 // block)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, tokens, 3, 5, generator=generator)
    order = torch.stack([torch.randperm(M, generator=generator) for _ in range(3)]).int()
    moved, back = torch.full((2, M * block, 3, 5), torch.nan), torch.full_like(q, torch.nan)
    gather_blocks(q, order, block, moved)
    for h in range(3):
        for slot in range(M):
            begin = int(order[h, slot]) * block
            wanted = q[:, begin : begin + block, h]
            got = moved[:, slot * block : slot * block + block, h]
            assert torch.equal(got[:, : wanted.shape[1]], wanted)
            assert not got[:, wanted.shape[1] :].any()
    scatter_blocks(moved, order, block, back)
    assert torch.equal(back, q)
    lse, lse_back = moved[..., 0].transpose(1, 2).contiguous(), torch.empty(2, 3, tokens)
    scatter_lse(lse, order, block, lse_back)
    assert torch.equal(lse_back, q[..., 0].transpose(1, 2))


@pytest.mark.parametrize("changes", [{}, {"batch": 2}, {"kv_heads": 2}])
def test_the_reference_is_masked_attention(changes, monkeypatch):
    from wavealign.gpu import reference
    from wavealign.gpu.inputs import Inputs

    monkeypatch.setattr(reference, "_SCORES_BYTES", 2000)  # several chunks a row
    mask, sizes = ragged_launch(**changes)
    inputs = Inputs.random(sizes, "cpu")
    out, lse = reference.reference_attention(mask, inputs)
    scale = sizes.head_dim**-0.5
    for b in range(sizes.batch):
        q, k, v = (t[b].double().numpy() for t in (inputs.q, inputs.k, inputs.v))
        k, v = (t.repeat(sizes.heads_per_kv_head, axis=1) for t in (k, v))
        wanted = dense_attention(q * scale, k, v, mask)
        np.testing.assert_allclose(out[b].numpy(), wanted, atol=2e-6)
    kept = np.stack([h.to_dense() for h in mask.heads()]).any(2).repeat(8, 1)[:, :45]
    assert np.array_equal(np.isfinite(lse[0].numpy()), kept)


@pytest.mark.parametrize("rows", ["gathered", "table"])
@pytest.mark.parametrize("changes", [{}, {"batch": 2}, {"kv_heads": 1}])
def test_a_right_kernel_passes_the_checks(rows, changes):
    from wavealign.gpu.correctness import check_launch, check_poke
    from wavealign.gpu.execution import Execution
    from wavealign.gpu.inputs import Inputs
    from wavealign.gpu.reference import reference_attention

    backend, (mask, sizes) = slow_backend(rows), ragged_launch(**changes)
    inputs = Inputs.random(sizes, "cpu")
    wanted = reference_attention(mask, inputs)
    for policy in ("original", "svd+nnz", "lockstep"):
        schedule = build_schedule(mask, policy, wave=3)
        launch = Execution.of(backend, sizes, schedule, inputs)
        assert launch.moves_rows == (rows == "gathered")
        assert check_launch(launch, wanted, policy).error_frac < 4e-3
        check_poke(launch, mask, policy)


@pytest.mark.parametrize(
    ("fault", "check", "said"),
    [
        ("drops a block", "launch", "relative error|LSE is -inf in other rows"),
        ("skips a row", "launch", "NaN or unwritten"),
        ("reads every block", "poke", "rows changed with V blocks that they don't keep"),
        ("drops every block", "poke", "rows didn't change with V blocks that they keep"),
    ],
)
def test_a_wrong_kernel_is_caught(fault, check, said):
    from wavealign.gpu.correctness import WrongResultError, check_launch, check_poke
    from wavealign.gpu.execution import Execution
    from wavealign.gpu.inputs import Inputs
    from wavealign.gpu.reference import reference_attention

    mask, sizes = ragged_launch()
    inputs = Inputs.random(sizes, "cpu")
    schedule = build_schedule(mask, "nnz", wave=3)
    launch = Execution.of(slow_backend(fault=fault), sizes, schedule, inputs)
    wanted = reference_attention(mask, inputs)
    checks = {
        "launch": lambda: check_launch(launch, wanted, "x"),
        "poke": lambda: check_poke(launch, mask, "x"),
    }
    with pytest.raises(WrongResultError, match=said):
        checks[check]()


def test_our_own_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests/interpreted_row_table.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "equal"


def test_backends_are_found_by_name_and_never_replaced():
    from wavealign.gpu.registry import BACKEND_NAMES, backends, find_backend

    assert [b.name for b in backends()] == list(BACKEND_NAMES)
    with pytest.raises(InputError, match="Did you mean 'triton'"):
        find_backend("tritom")
    with pytest.raises(MissingCapabilityError, match="plan sorts rows by K/V length"):
        find_backend("flashinfer")


def test_fa4_isnt_used_on_blackwell():
    from wavealign.gpu.fa4 import FlashAttention4

    sizes = Sizes.of(random_mask())
    with pytest.raises(InputError, match=r"backend 'fa4' runs on compute capability 9\.0"):
        FlashAttention4().check(sizes, (10, 0))


def test_the_first_profile_that_fits_a_gpu():
    from wavealign.sim.devices import device_of_gpu, load_device

    found = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100 80GB PCIe": None,
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 3090": None,
    }
    assert {gpu: device_of_gpu(gpu) for gpu in found} == found
    assert all(load_device(name) for name in found.values() if name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "say --gpu"), (("--gpu",), "validate --gpu needs an NVIDIA GPU")],
)
def test_validate_without_a_gpu_exits_with_3(tmp_path, arguments, said):
    save_mask(tmp_path / "m.npz", random_mask())
    out = tmp_path / "runs.jsonl"
    result = CliRunner().invoke(
        main, ["validate", "--mask", str(tmp_path / "m.npz"), "--out", str(out), *arguments]
    )
    assert result.exit_code == 3
    assert said in result.output
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--backend", "tritom"), "unknown backend 'tritom'. Did you mean 'triton'?"),
        (("--policy", "lockstpe"), "unknown policy 'lockstpe'. Did you mean 'lockstep'?"),
        (("--trace", "folder"), "--trace needs --backend triton"),
        (("--regime", "hot"), "'hot' is not one of 'single', 'steady'"),
    ],
)
def test_validate_says_what_is_wrong_before_it_asks_for_a_gpu(tmp_path, arguments, said):
    save_mask(tmp_path / "m.npz", random_mask())
    result = CliRunner().invoke(main, ["validate", "--mask", str(tmp_path / "m.npz"), *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_a_backend_says_what_it_needs_and_which_version_it_is():
    from importlib.metadata import version

    backend = slow_backend()
    assert backend.missing() is None
    assert backend.version() == "slow"
    backend.distribution = "torch"
    assert backend.version() == f"torch {version('torch')}"
    backend.needs = (("torch", "gpu"), ("no_such.module", "fa4"))
    assert backend.missing() == "no_such.module isn't installed: pip install 'wavealign[fa4]'"
