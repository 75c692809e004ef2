"""Tensors of every kind, under every mode of torch: the right attention, or a refusal."""

import contextlib

import pytest
from attention_cases import BLOCK, blocks, dense_attention, inputs

import wavealign
from wavealign.errors import InputError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from wavealign.methods import head_masks  # noqa: E402

AHEAD = {"device_profile": "h200", "backend": "reference", "block": BLOCK}


class Subclass(torch.Tensor):
    """A tensor with a name of its own, nothing else."""


def attend(q, k, v, mask):
    return wavealign.attend(q, k, v, mask, policy="lockstep", **AHEAD)


def site(q, k, v, mask):
    made = wavealign.Attention("h200", policy="lockstep", backend="reference", block=BLOCK)
    return made(q, k, v, mask)


def planned(q, k, v, mask):
    plan = wavealign.plan(mask, "lockstep", tokens=(75, 61), **AHEAD)
    return wavealign.attend(q, k, v, plan=plan)


everywhere = pytest.mark.parametrize("call", [attend, site, planned])


def shifted(t):
    """The same elements at an address that is off by one."""
    return torch.empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


READ = {
    "last axis apart": lambda t: t.mT.contiguous().mT,
    "heads within tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "shifted": shifted,
    "rows apart": lambda t: torch.nn.functional.pad(t, (0, 5))[..., :16],
    "one head for all": lambda t: t[:, :1].expand(-1, 4, -1, -1),
    "one sequence for all": lambda t: t[:1].expand(2, -1, -1, -1),
    "subclass": lambda t: t.as_subclass(Subclass),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "inference": lambda t: torch.inference_mode()(torch.clone)(t),
    "negative bit": lambda t: torch._neg_view(-t),
    "16 bits": lambda t: t.half(),
}


@everywhere
@pytest.mark.parametrize("form", READ)
def test_tensors_that_lie_oddly_are_read(call, form):
    qkv, mask = [READ[form](t) for t in inputs()], blocks()
    wanted = dense_attention(*(t.float() for t in qkv), mask)[0]
    close = {"atol": 2e-3, "rtol": 2e-3} if form == "16 bits" else {}
    torch.testing.assert_close(call(*qkv, mask).as_subclass(torch.Tensor).float(), wanted, **close)


@everywhere
@pytest.mark.parametrize(
    "form",
    [
        lambda m: m.mT.contiguous().mT,
        lambda m: m.byte() * 2,
        lambda m: m[None].expand(2, -1, -1, -1),
        lambda m: m.as_subclass(Subclass),
        lambda m: m.flip(-1).flip(-1)[..., None].expand(-1, -1, -1, 3)[..., 1],
    ],
)
def test_masks_that_lie_oddly_are_read(call, form):
    mask = blocks()
    wanted = dense_attention(*inputs(), mask)[0]
    torch.testing.assert_close(call(*inputs(), form(mask)).as_subclass(torch.Tensor), wanted)


WITHOUT_ELEMENTS = {
    "meta": (lambda t: t.to("meta"), "on the meta device"),
    "sparse": (lambda t: t.to_sparse(), "in layout torch.sparse_coo"),
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "is nested"),
    "jagged": (
        lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged), "a NestedTensor",
    ),
    "fake": (lambda t: FakeTensorMode().from_tensor(t), "a FakeTensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@everywhere
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("kind", WITHOUT_ELEMENTS)
def test_tensors_without_elements_of_their_own_are_refused(call, kind, which):
    form, message = WITHOUT_ELEMENTS[kind]
    given = [*inputs(), blocks()]
    if kind == "jagged" and which == 3:
        given[which] = given[which].float()  # bool ones don't exist
    given[which] = form(given[which])
    with pytest.raises(InputError, match=message):
        call(*given)


def dual(function, primal):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(primal, primal))


DERIVATIVES = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "dual": dual,
    "backward": lambda f, x: f(x.requires_grad_()),
}
TRACERS = {
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
    "trace": lambda f, x: torch.jit.trace(f, (x,)),
    "make_fx": lambda f, x: make_fx(f)(x),
    "fake": lambda f, x: make_fx(f, tracing_mode="fake")(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@everywhere
@pytest.mark.parametrize(
    ("kind", "which"),
    [(kind, i) for kind in DERIVATIVES for i in range(3)]  # a mask has none
    + [(kind, i) for kind in TRACERS for i in range(4)],
)
def test_transforms_and_tracers_are_refused(call, kind, which):
    given = [*inputs(), blocks()]
    with pytest.raises(InputError, match=r"gradient|torch\.func|traced|FakeTensor"):
        (DERIVATIVES | TRACERS)[kind](
            lambda x: call(*given[:which], x, *given[which + 1 :]), given[which].clone()
        )


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "another device by default": lambda: torch.device("meta"),
    "64 bits by default": lambda: default_dtype(torch.float64),
    "16 bits by default": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
}


@everywhere
@pytest.mark.parametrize("mode", MODES)
def test_modes_change_neither_attention_nor_plans(call, mode):
    qkv, mask = inputs(), blocks()
    square = torch.rand(2, 40, 40, generator=torch.Generator().manual_seed(1)) < 0.3
    policies = ("svd", "svd+nnz", "resync")
    plans = [wavealign.plan(square, p, **{**AHEAD, "block": None}) for p in policies]
    with MODES[mode]():
        out = call(*qkv, mask)
        again = [wavealign.plan(square, p, **{**AHEAD, "block": None}) for p in policies]
    torch.testing.assert_close(out.clone(), dense_attention(*qkv, mask)[0])
    for one, other in zip(plans, again, strict=True):
        assert torch.equal(one.schedule.table, other.schedule.table)
        assert torch.equal(one.schedule.indices, other.schedule.indices)


@pytest.mark.parametrize("policy", ["lockstep", "svd+nnz/shuffled+sawtooth", "auto"])
def test_a_site_goes_from_mode_to_mode(policy):
    qkv, mask = inputs(), blocks()
    wanted = dense_attention(*qkv, mask)[0]
    one = wavealign.Attention("h200", policy=policy, backend="reference", block=BLOCK)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            out = one(*qkv, mask).clone()
            again = one(*qkv, mask, same_mask=True).clone()
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(again, wanted)


@pytest.mark.parametrize("method", ["xattention", "exact", "spargeattn", "minference"])
def test_methods_round_nothing_under_autocast(method):
    q, k = torch.randn(2, 1, 600, 2, 16, generator=torch.Generator().manual_seed(2))
    made = head_masks(method, 3 * q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head_masks(method, 3 * q, k), made)
