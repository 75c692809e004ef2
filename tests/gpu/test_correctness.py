"""Is it the same attention? One wrong row of many has to be found, and rounding isn't wrong."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from types import SimpleNamespace  # noqa: E402

from wavealign.gpu.correctness import WrongResultError, check_launch  # noqa: E402

B, M, H, D, BLOCK, TOKENS = 2, 300, 3, 16, 8, 2395  # the last query block has 3 tokens


def reference(scale=None):
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(B, TOKENS, H, D, generator=generator)
    if scale is not None:
        out *= scale
    return out, torch.zeros(B, H, TOKENS)


def check(out, wanted):
    launch = SimpleNamespace(
        buffers=(torch.empty(1),),
        attend=lambda: (out, wanted[1]),
        sizes=SimpleNamespace(dtype="bf16", block_q=BLOCK),
    )
    return check_launch(launch, wanted, "x")


def rows(i, block=BLOCK):
    return slice(i * block, min((i + 1) * block, TOKENS))


def test_errors_are_norms_over_all_and_over_a_row():
    wanted = reference()
    out = wanted[0].to(torch.bfloat16)
    found = check(out, wanted)
    difference = out.double() - wanted[0].double()
    assert found.error_frac == pytest.approx(float(difference.norm() / wanted[0].double().norm()))
    each = {}
    for b, h, i in itertools.product(range(B), range(H), range(M)):
        own = (b, rows(i), h)
        each[b, h, i] = float(difference[own].norm() / wanted[0][own].double().norm())
    worst = max(each, key=each.get)
    assert found.worst_row == worst
    assert found.row_error_frac == pytest.approx(each[worst], rel=1e-5)
    assert found.error_frac < found.row_error_frac < 4e-3


@pytest.mark.parametrize("i", [0, 170, M - 1])
def test_one_zeroed_block_of_many_is_found(i):
    wanted = reference()
    out = wanted[0].to(torch.bfloat16)
    out[1, rows(i), 2] = 0
    said = rf"x: relative error 1\.00e\+00 in query block {i} of head 2, sequence 1"
    with pytest.raises(WrongResultError, match=said):
        check(out, wanted)


def test_swapped_rows_are_found():
    wanted = reference()
    out = wanted[0].to(torch.bfloat16)
    own = out[1, rows(170), 2].clone()
    out[1, rows(170), 2] = own.flip(0)
    with pytest.raises(WrongResultError, match="in query block 170 of head 2, sequence 1"):
        check(out, wanted)
    out[1, rows(170), 2] = own
    out[0, 4], out[0, 5] = out[0, 5].clone(), out[0, 4].clone()  # two tokens of one block
    with pytest.raises(WrongResultError, match="in query block 0 of head"):
        check(out, wanted)


def test_rows_without_blocks_are_zero_and_nothing_else():
    scale = torch.ones(B, TOKENS, H, 1)
    scale[1, rows(170), 2] = 0
    scale[:, :, 0] = 0  # a head that keeps nothing
    wanted = reference(scale)
    out = wanted[0].to(torch.bfloat16)
    assert check(out, wanted).row_error_frac < 4e-3
    for b, i, h in ((1, 170, 2), (0, 3, 0)):
        wrong = out.clone()
        wrong[b, rows(i), h] = 1e-2
        with pytest.raises(WrongResultError, match=f"query block {i} of head {h}, sequence {b}"):
            check(wrong, wanted)


def test_a_row_that_cancels_keeps_the_rounding_of_what_cancelled():
    scale = torch.ones(B, TOKENS, H, 1)
    scale[1, rows(170), 2] = 1e-3
    wanted = reference(scale)
    out = wanted[0].to(torch.bfloat16)
    out[1, rows(170), 2] += 2e-4  # a fifth of the row, but less than the others' rounding
    assert check(out, wanted).row_error_frac < 8e-3
    out[1, rows(170), 2] = 1e-2
    with pytest.raises(WrongResultError, match="query block 170 of head 2"):
        check(out, wanted)
