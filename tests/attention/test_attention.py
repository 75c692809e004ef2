"""`attend`, `plan` and `Attention` on the CPU, against dense attention."""

import warnings

import numpy as np
import pytest
from attention_cases import BLOCK, blocks, dense_attention, inputs
from helpers import nothing_waits, random_mask

import wavealign
from wavealign.errors import InputError, MissingCapabilityError
from wavealign.masks import BlockMask

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

import torch.nn.attention.flex_attention as flex  # noqa: E402

from wavealign.attention import terms  # noqa: E402
from wavealign.attention.dense import attend_dense  # noqa: E402

CPU = {"backend": "reference", "device_profile": "h200", "block": BLOCK}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", ["auto", "fa4", "triton", "reference"])
@pytest.mark.parametrize(
    ("dtype", "D"), [("bfloat16", 128), ("float16", 64), ("bfloat16", 80), ("float32", 64)]
)
def test_full_attention(dtype, D, backend, device):
    q, k, v = (x.to(getattr(torch, dtype)).transpose(1, 2) for x in inputs(tokens=(300, 300), D=D))
    expected, _ = dense_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), torch.ones(4, 19, 38, dtype=torch.bool)
    )
    out = attend_dense(*(x.to(device) for x in (q, k, v)), backend)
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    error = (out.cpu().double().transpose(1, 2) - expected).norm() / expected.norm()
    assert error < {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-3}[dtype]


@pytest.mark.parametrize("policy", ["auto", "original", "svd+nnz", "lockstep"])
@pytest.mark.parametrize("B", [None, 2])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attend_is_attention(policy, B, kv_heads):
    q, k, v = inputs(kv_heads=kv_heads)
    mask = blocks(B=B)
    out, lse = wavealign.attend(q, k, v, mask, policy=policy, return_lse=True, **CPU)
    expected, expected_lse = dense_attention(q, k, v, mask)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    swapped = wavealign.attend(
        *(t.transpose(1, 2) for t in (q, k, v)), mask, policy=policy, layout="bshd", **CPU
    )
    torch.testing.assert_close(swapped.transpose(1, 2), expected)


def test_a_plan_and_a_block_mask():
    q, k, v = inputs()
    mask = blocks()
    host = BlockMask.from_dense(mask.numpy(), BLOCK, (75, 61))
    expected, _ = dense_attention(q, k, v, mask)
    planned = wavealign.plan(
        host, "nnz/shuffled+sawtooth", device_profile="h200", backend="reference"
    )
    assert planned.policies == ("nnz/shuffled+sawtooth",) * 4
    assert planned.explain().splitlines()[3] == "head 3: nnz/shuffled+sawtooth, as asked"
    torch.testing.assert_close(wavealign.attend(q, k, v, plan=planned), expected)
    torch.testing.assert_close(wavealign.attend(q, k, v, mask, plan=planned), expected)
    automatic = wavealign.plan(
        mask, device_profile="h200", backend="reference", block=BLOCK, tokens=(75, 61)
    )
    assert automatic.explain().startswith("head 0: original")
    torch.testing.assert_close(wavealign.attend(q, k, v, plan=automatic), expected)


def test_nan_goes_through():
    q, k, v = inputs(B=1)
    q[0, 2, 5] = torch.nan
    out = wavealign.attend(q, k, v, blocks(density=1.1), policy="nnz", **CPU)
    bad = torch.isnan(out).any(-1)[0]
    assert bad[2, 5]
    assert int(bad.sum()) == 1


@pytest.mark.parametrize("policy", ["auto", "svd", "resync"])
def test_autocast_has_no_say(policy):
    (q, k, v), mask = inputs(), blocks()

    def run():
        plan = wavealign.plan(mask, policy, block=BLOCK, backend="reference", device_profile="h200")
        out = wavealign.attend(q, k, v, mask, policy=policy, **CPU)
        return plan.schedule.table, plan.schedule.indices, out

    wanted = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(x, y) for x, y in zip(run(), wanted, strict=True))


def test_inference_mode_and_compile():
    q, k, v = inputs()
    mask = blocks()
    expected, _ = dense_attention(q, k, v, mask)
    site = wavealign.Attention("h200", backend="reference", block=BLOCK)
    with torch.inference_mode():
        torch.testing.assert_close(site(q, k, v, mask), expected)
    torch.testing.assert_close(site(q, k, v, mask.clone()), expected)

    def model(x):
        return wavealign.attend(x, k, v, mask, policy="nnz", **CPU) * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(q), 2 * expected)


def test_a_site_remembers(monkeypatch):
    monkeypatch.setattr("wavealign.guard.decide.LOOK_FRAC", 1e9)  # these launches are tiny
    site = wavealign.Attention(
        "h200", wavealign.Reuse(calls=3, min_overlap=0.5), backend="reference", block=BLOCK
    )
    q, k, v = inputs()
    mask = blocks()
    for step in range(4):
        expected, _ = dense_attention(q, k, v, mask)
        torch.testing.assert_close(site(q, k, v, mask, same_mask=step in (1, 3)), expected)
        if step == 1:
            mask[0, 0, 0] ^= True  # in place: the same tensor, another mask
    assert (site.statistics.calls, site.statistics.reused, site.statistics.planned) == (4, 2, 2)
    assert site.statistics.decided == 1
    for step in range(4):
        mask = blocks(seed=9 + step)
        expected, _ = dense_attention(q, k, v, mask)
        torch.testing.assert_close(site(q, k, v, mask), expected)
    assert site.statistics.changed >= 1
    assert site.statistics.decided >= 2
    assert site.statistics.skipped == 8
    assert site.statistics.host_seconds > 0
    assert "head 3: original" in site.explain()


def test_a_site_decides_again_after_some_calls():
    site = wavealign.Attention("h200", wavealign.Reuse(calls=2), backend="reference", block=BLOCK)
    q, k, v = inputs(B=1)
    mask = blocks()
    for _ in range(5):
        site(q, k, v, mask.clone())
    assert site.statistics.decided == 3
    assert site.statistics.planned == 5


def test_a_profile_of_another_gpu_warns_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(terms, "_warned", set())
    with pytest.warns(UserWarning, match="profile 'a40' on a NVIDIA H100 80GB HBM3"):
        assert terms.profile_name("a40") == "a40"
    assert terms.profile_name("a40") == "a40"  # a second warning would be an error
    assert terms.profile_name(None) == "h100"


def test_old_shapes_are_forgotten():
    site = wavealign.Attention("h200", policy="nnz", backend="reference", block=BLOCK)
    for tokens in range(16, 16 * 20, 16):
        q, k, v = inputs(B=1, H=1, tokens=(tokens, 8))
        site(q, k, v, torch.ones(1, tokens // 16, 1, dtype=torch.bool))
    assert len(site._lanes.values()) == 16
    assert len(site._buffers._lanes.values()) == 16


def changed(**changes):
    def make():
        q, k, v = inputs()
        arguments = {"q": q, "k": k, "v": v, "mask": blocks(), "policy": "nnz", **CPU}
        return {
            **arguments,
            **{key: change(arguments[key]) for key, change in changes.items()},
        }

    return make


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (changed(q=lambda t: t[0]), r"expected a tensor \[B, H, S, D\]"),
        (changed(q=lambda t: t.long()), "bfloat16 or float16"),
        (changed(k=lambda t: t.half()), "expected the same"),
        (changed(v=lambda t: t[..., :8]), "differ in shape"),
        (changed(k=lambda t: t[:, :3], v=lambda t: t[:, :3]), "K/V heads divide"),
        (changed(q=lambda t: t.requires_grad_()), "no backward pass"),
        (changed(mask=lambda t: t.float()), "expected torch.bool"),
        (changed(mask=lambda t: t[0]), r"expected \[H, M, N\]"),
        (changed(mask=lambda t: t.numpy()), r"of type numpy\.ndarray"),
        (
            changed(
                mask=lambda t: flex.BlockMask.from_kv_blocks(
                    torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int()
                )
            ),
            r"of type torch\.nn.*\.BlockMask; expected a torch.Tensor or a wavealign\.BlockMask",
        ),
        (changed(mask=lambda t: t[:3]), "3 heads, q has 4"),
        (changed(mask=lambda t: t[:, :4]), "75 query tokens in blocks of 16 make 5 blocks"),
        (changed(mask=lambda t: t.expand(3, -1, -1, -1)), "3 sequences, q has 2"),
        (changed(mask=lambda _: None), "needs a mask or a plan"),
        (changed(block=lambda _: (16, 16)), "is block="),
        (changed(policy=lambda _: "nzz"), "Did you mean 'nnz'"),
        (changed(policy=lambda _: "auto", device_profile=lambda _: "h20"), "unknown device"),
        (changed(backend=lambda _: "fa5"), "Did you mean 'fa4'"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(InputError, match=message):
        wavealign.attend(**arguments())


def test_the_other_layout_is_noticed():
    q, k, v = (t.transpose(1, 2) for t in inputs(tokens=(75, 61)))
    with pytest.raises(InputError):
        wavealign.attend(q, k, v, blocks(), policy="nnz", **CPU)
    square = torch.zeros(1, 64, 4, 16)
    mask = torch.ones(4, 1, 1, dtype=torch.bool)
    with pytest.raises(InputError, match="say layout='bshd'"):
        wavealign.attend(
            square,
            square,
            square,
            mask,
            policy="nnz",
            backend="reference",
            device_profile="h200",
            block=(64, 64),
        )


def test_never_silently_on_a_cpu():
    q, k, v = inputs()
    with pytest.raises(MissingCapabilityError, match="backend='reference'"):
        wavealign.attend(q, k, v, blocks(), block=BLOCK)
    with pytest.raises(InputError, match=r"no device profile .*device_profile='h200'"):
        wavealign.attend(q, k, v, blocks(), block=BLOCK, backend="reference")


def test_plans_for_something_else():
    q, k, v = inputs()
    planned = wavealign.plan(
        blocks(), "nnz", "h200", block=BLOCK, tokens=(75, 61), backend="reference"
    )
    with pytest.raises(InputError, match="planned for 75 query"):
        wavealign.attend(q[:, :, :70], k, v, plan=planned)
    with pytest.raises(InputError, match="but the plan is for 'reference'"):
        wavealign.attend(q, k, v, plan=planned, backend="triton")
    with pytest.raises(InputError, match="5x8 blocks"):
        wavealign.attend(q, k, v, blocks()[:, :4], plan=planned)
    with pytest.raises(InputError, match="reuse of 0 calls"):
        wavealign.Reuse(calls=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # of the packages below FlashAttention-4
@pytest.mark.parametrize("backend", ["triton", "fa4"])
@pytest.mark.parametrize("policy", ["auto", "original", "nnz/shuffled+sawtooth", "lockstep"])
def test_on_a_gpu(backend, policy):
    mask = random_mask(0, (4, 9, 11), 0.5, (128, 128), (1100, 1400))
    dense = torch.from_numpy(np.stack([h.to_dense() for h in mask.heads()])).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, n, 128, device="cuda", generator=generator).bfloat16()
        for n in (1100, 1400, 1400)
    )
    try:
        out = wavealign.attend(q, k, v, dense, backend=backend, policy=policy)
    except MissingCapabilityError as missing:
        pytest.skip(str(missing))
    expected = wavealign.attend(q, k, v, dense, backend="reference", policy="original")
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < 8e-3
    batched = torch.stack([dense, dense.flip(1)])
    out = wavealign.attend(q, k, v, batched, backend=backend, policy=policy)
    expected = wavealign.attend(q, k, v, batched, backend="reference", policy="original")
    assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 2])
def test_nothing_waits_for_the_gpu(B):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, n, 128, device="cuda", generator=generator).bfloat16()
        for n in (1100, 1400, 1400)
    )
    masks = [torch.rand(B, 4, 9, 11, device="cuda", generator=generator) < 0.5 for _ in range(3)]
    site = wavealign.Attention(policy="nnz/shuffled+sawtooth", backend="triton")
    planned = wavealign.plan(masks[2], "lockstep", tokens=(1100, 1400), backend="triton")
    site(q, k, v, masks[0])  # compiles, and copies what is drawn on the host
    with nothing_waits():
        out = site(q, k, v, masks[1])
        by_plan = wavealign.attend(q, k, v, plan=planned)
    for found, mask in ((out, masks[1]), (by_plan, masks[2])):
        expected = wavealign.attend(q, k, v, mask, backend="reference", policy="original")
        assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 8e-3
