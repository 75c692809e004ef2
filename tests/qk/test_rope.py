"""Rotary position."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from wavealign.errors import InputError  # noqa: E402
from wavealign.qk import TokenGrid  # noqa: E402
from wavealign.qk.rope import axial_angles, rotate  # noqa: E402

WAN, HUNYUAN = ((44, 42, 42), 1e4), ((16, 56, 56), 256.0)


def test_rotation_keeps_only_differences_of_position():
    """(R_a q)·(R_b k) depends on b - a alone, along every axis."""
    grid = TokenGrid(4, 5, 6)
    generator = torch.manual_seed(0)
    q, k = (torch.randn(1, 128, generator=generator).expand(120, -1) for _ in "qk")
    angles = axial_angles(grid, *WAN)
    turned = [rotate(x, angles).view(4, 5, 6, 128) for x in (q, k)]
    for shift in ((1, 0, 0), (0, 2, 0), (0, 0, 3), (1, 1, 1)):
        t, h, w = shift
        products = (turned[0][: 4 - t, : 5 - h, : 6 - w] * turned[1][t:, h:, w:]).sum(-1)
        torch.testing.assert_close(products, products.flatten()[0].expand_as(products))


@pytest.mark.parametrize("model", [WAN, HUNYUAN])
@pytest.mark.parametrize("text", [0, 7])
def test_rotation_against_complex_numbers(model, text):
    x = torch.randn(60 + text, 128, generator=torch.manual_seed(0))
    angles = axial_angles(TokenGrid(3, 4, 5), *model)
    found = rotate(x, angles)
    values = x[:60].double().numpy()
    pairs = (values[:, 0::2] + 1j * values[:, 1::2]) * np.exp(1j * angles.numpy())
    expected = np.empty((60, 128))
    expected[:, 0::2], expected[:, 1::2] = pairs.real, pairs.imag
    np.testing.assert_allclose(found[:60].numpy(), expected, atol=1e-5)
    assert (found[60:] == x[60:]).all()


def test_axial_angles():
    angles = axial_angles(TokenGrid(2, 3, 4), (4, 2, 2), 100.0).view(2, 3, 4, 4)
    assert angles[1, 2, 3].tolist() == pytest.approx([1.0, 0.1, 2.0, 3.0])
    hunyuan = axial_angles(TokenGrid(2, 2, 2), *HUNYUAN)
    assert hunyuan.shape == (8, 64)
    with pytest.raises(InputError, match="even"):
        axial_angles(TokenGrid(1, 1, 1), (3, 2, 2), 10.0)
    with pytest.raises(InputError, match="don't fit"):
        rotate(torch.zeros(8, 64), hunyuan)


def test_against_diffusers():
    """The tables that diffusers' transformers make for the same latents."""
    pytest.importorskip("diffusers")
    from diffusers.models.transformers import (
        transformer_hunyuan_video as hunyuan,
    )
    from diffusers.models.transformers import (
        transformer_wan as wan,
    )

    latents = torch.zeros(1, 16, 3, 8, 10)
    for model, module in (
        (WAN, wan.WanRotaryPosEmbed(128, (1, 2, 2), 1024)),
        (HUNYUAN, hunyuan.HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56], 256.0)),
    ):
        cos, sin = (table.reshape(60, 128)[:, ::2] for table in module(latents))
        angles = axial_angles(TokenGrid(3, 4, 5), *model)
        torch.testing.assert_close(angles.cos(), cos.double(), atol=1e-5, rtol=0)
        torch.testing.assert_close(angles.sin(), sin.double(), atol=1e-5, rtol=0)
