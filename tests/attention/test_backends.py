"""Every way to attend by backends that need no GPU: the reference, and one that a test adds."""

import dataclasses

import pytest
from attention_cases import BLOCK, blocks, dense_attention, inputs

import wavealign
from wavealign.errors import InputError, MissingCapabilityError
from wavealign.masks import BlockMask

torch = pytest.importorskip("torch")

from wavealign.gpu import registry  # noqa: E402
from wavealign.gpu.execution import Execution  # noqa: E402
from wavealign.gpu.inputs import Inputs  # noqa: E402
from wavealign.gpu.sizes import Sizes  # noqa: E402

NAMES = ("reference", "toy")
CPU = {"device_profile": "h200", "block": BLOCK}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """One line in the registry, as CONTRIBUTING.md says."""
    monkeypatch.setitem(registry._KNOWN, "toy", "toy_backend:Toy")


@pytest.mark.parametrize("tokens", [(80, 64), (75, 61)])
@pytest.mark.parametrize("B", [None, 2])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("policy", ["original", "svd+nnz", "lockstep", "nnz/shuffled+sawtooth"])
@pytest.mark.parametrize("name", NAMES)
def test_attend_by_name(name, policy, kv_heads, B, tokens):
    q, k, v = inputs(kv_heads=kv_heads, tokens=tokens)
    mask = blocks(B=B, tokens=tokens)
    expected, expected_lse = dense_attention(q, k, v, mask)
    options = {"policy": policy, "backend": name, "return_lse": True, **CPU}
    out, lse = wavealign.attend(q, k, v, mask, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("name", NAMES)
def test_plans_and_sites(name):
    q, k, v = inputs()
    mask = blocks(B=2)
    expected, _ = dense_attention(q, k, v, mask)
    ahead = {"backend": name, "head_dim": 16}
    planned = wavealign.plan(mask, "lockstep", tokens=(75, 61), **ahead, **CPU)
    torch.testing.assert_close(wavealign.attend(q, k, v, plan=planned), expected)
    torch.testing.assert_close(wavealign.attend(q, k, v, plan=planned, backend=name), expected)
    site = wavealign.Attention("h200", backend=name, block=BLOCK)
    for again in (False, True):
        torch.testing.assert_close(site(q, k, v, mask, same_mask=again), expected)
    assert site.statistics.reused == 1
    host = BlockMask.from_dense(blocks().numpy(), BLOCK, (75, 61))
    planned = wavealign.plan(host, "nnz", "h200", **ahead)
    expected, _ = dense_attention(q, k, v, blocks())
    torch.testing.assert_close(wavealign.attend(q, k, v, plan=planned), expected)


@pytest.mark.parametrize("tokens", [(80, 64), (75, 61)])
@pytest.mark.parametrize("name", NAMES)
def test_schedules_of_the_host_take_the_same_road(name, tokens):
    q, k, v = inputs(tokens=tokens)
    mask = BlockMask.from_dense(blocks(tokens=tokens).numpy(), BLOCK, tokens)
    expected, expected_lse = dense_attention(q, k, v, blocks(tokens=tokens))
    data = Inputs(*(t.transpose(1, 2) for t in (q, k, v)))
    sizes = Sizes.of(mask, batch=2, head_dim=16, dtype="fp32")
    backend = registry.find_backend(name)
    backend.check(sizes, None)
    launch = Execution.of(backend, sizes, wavealign.build_schedule(mask, "lockstep", 3), data)
    for _ in range(2):
        out, lse = launch.attend()
        torch.testing.assert_close(out.transpose(1, 2), expected)
        torch.testing.assert_close(lse, expected_lse)
    everything, _ = dense_attention(q, k, v, torch.ones(4, mask.M, mask.N, dtype=torch.bool))
    padded = torch.nn.functional.pad(data.q, (0, 0, 0, 0, 0, mask.M * 16 - tokens[0]))
    full = dataclasses.replace(data, q=padded if name == "toy" else data.q).arranged(strided=False)
    dense = backend.bind_dense(sizes, full).launch()[0][:, : tokens[0]]
    torch.testing.assert_close(dense.transpose(1, 2), everything)


def test_strides_are_as_the_backend_wants_them():
    q, k, v = (t.transpose(1, 2) for t in inputs())
    data = Inputs(q, k[..., ::2], v)
    assert data.arranged(strided=True).q is q
    assert data.arranged(strided=True).k.is_contiguous()
    assert all(t.is_contiguous() for t in vars(data.arranged(strided=False)).values())


def test_lists_for_another_kernel_are_refused():
    q, k, v = inputs()
    planned = wavealign.plan(blocks(), "nnz", backend="reference", tokens=(75, 61), **CPU)
    other = dataclasses.replace(planned, backend=registry.find_backend("toy"))
    with pytest.raises(InputError, match="backend 'toy' reads ListLayout"):
        wavealign.attend(q, k, v, plan=other)


def test_what_a_backend_does_not_take_and_what_is_none():
    q, k, v = inputs(D=32)
    with pytest.raises(InputError, match="backend 'toy' takes head dimensions 16, not 32"):
        wavealign.attend(q, k, v, blocks(), backend="toy", policy="nnz", **CPU)
    with pytest.raises(InputError, match=r"unknown backend 'toi'.*Valid: auto, fa4, .*, toy"):
        wavealign.attend(q, k, v, blocks(), backend="toi", policy="nnz", **CPU)
    with pytest.raises(MissingCapabilityError, match="'flashinfer': refused: its plan sorts rows"):
        wavealign.attend(q, k, v, blocks(), backend="flashinfer", policy="nnz", **CPU)
    with pytest.raises(MissingCapabilityError, match="backend 'flex' needs q, k and v on an"):
        wavealign.attend(q, k, v, blocks(), backend="flex", policy="nnz", **CPU)


def test_backends_are_made_once():
    assert registry.find_backend("toy") is registry.find_backend("toy")
    assert [b.name for b in registry.backends()] == list(registry.BACKEND_NAMES)
