"""What a kernel can't take: derivatives are refused, memory layouts are copied."""

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

import wavealign  # noqa: E402
from wavealign.errors import InputError  # noqa: E402
from wavealign.gpu.importance import attend_with_importance  # noqa: E402
from wavealign.gpu.inputs import Inputs, laid_out  # noqa: E402

# torch's own, on the first dual tensor of a process.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

K, V = torch.randn(2, 1, 2, 32, 16).unbind()
BITS = torch.ones(2, 2, 2, dtype=torch.bool)


def attend(q):
    return wavealign.attend(
        q, K, V, BITS, backend="reference", policy="nnz", device_profile="h200", block=(16, 16)
    )


def site(q):
    there = wavealign.Attention("h200", policy="nnz", backend="reference", block=(16, 16))
    return there(q, K, V, BITS)


def search(q):
    return attend_with_importance(*(x.transpose(1, 2) for x in (q, K, V)), block=(16, 16)).out


def dual(function, q):
    with forward_ad.dual_level(), torch.no_grad():
        function(forward_ad.make_dual(q, torch.ones_like(q)))


def outer_jvp(function, q):
    """The tangent is of the outer level, and the inner one doesn't show it."""

    def outer(a):
        return torch.func.jvp(lambda b: function(a) * b, (q,), (q,))[1]

    torch.func.jvp(outer, (q,), (q,))


TRANSFORMS = {
    "backward": lambda function, q: function(q.clone().requires_grad_()),
    "dual": dual,
    "jvp": lambda function, q: torch.func.jvp(function, (q,), (q,)),
    "outer jvp": outer_jvp,
    "jacfwd": lambda function, q: torch.func.jacfwd(function)(q),
    "grad": lambda function, q: torch.func.grad(lambda x: function(x).sum())(q),
    "vmap": lambda function, q: torch.func.vmap(function)(q[None]),
}


@pytest.mark.parametrize("function", [attend, site, search])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_derivative_is_refused_and_not_lost(transform, function):
    with pytest.raises(InputError, match="q requires a gradient or carries a tangent"):
        TRANSFORMS[transform](function, torch.randn(1, 2, 32, 16))


def test_inside_of_a_dual_level_plain_tensors_are_welcome():
    q = torch.randn(1, 2, 32, 16)
    with forward_ad.dual_level():
        inside = attend(q)
    assert torch.equal(inside, attend(q))
    with torch.no_grad():
        assert torch.equal(attend(q.clone().requires_grad_()), inside)


def bf16(*shape):
    return torch.randn(shape).to(torch.bfloat16)


LAYOUTS = {  # [B, tokens, heads, D], and whether a descriptor can say how it lies in memory
    "contiguous": (bf16(2, 6, 2, 64), True),
    "heads first": (bf16(2, 2, 6, 64).transpose(1, 2), True),
    "rows of 136": (bf16(2, 6, 2, 136)[..., :128], True),
    "rows of 130": (bf16(2, 6, 2, 130)[..., :128], False),
    "off by 2 bytes": (bf16(2 * 6 * 2 * 64 + 1)[1:].view(2, 6, 2, 64), False),
    "off by 16 bytes": (bf16(2 * 6 * 2 * 64 + 8)[8:].view(2, 6, 2, 64), True),
    "a batch of stride 1": (bf16(6 * 2 * 64).as_strided((1, 6, 2, 64), (1, 128, 64, 1)), False),
    "a head of stride 3": (bf16(6 * 64).as_strided((1, 6, 1, 64), (384, 64, 3, 1)), False),
    "every second": (bf16(2, 6, 2, 128)[..., ::2], False),
    "expanded": (bf16(1, 6, 2, 64).expand(2, -1, -1, -1), True),
}


def fits(tensor):
    steps = [tensor.data_ptr(), *(2 * stride for stride in tensor.stride()[:-1])]
    return tensor.stride(-1) == 1 and all(step % 16 == 0 for step in steps)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_kernel_cannot_read_in_place_is_copied(name):
    tensor, readable = LAYOUTS[name]
    assert fits(tensor) == readable
    made = laid_out(tensor)
    assert (made is tensor) == readable
    assert fits(made)
    assert torch.equal(made, tensor)
    for strided in (True, False):
        arranged = Inputs(tensor, tensor, tensor).arranged(strided)
        for found in (arranged.q, arranged.k, arranged.v):
            assert fits(found)
            assert torch.equal(found, tensor)
            assert strided or found.is_contiguous()
