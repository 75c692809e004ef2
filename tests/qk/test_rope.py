"""Rotary position."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from wavealign.errors import InputError  # noqa: E402
from wavealign.qk import MODELS, TokenGrid  # noqa: E402
from wavealign.qk.rope import axial_angles, model_angles, rotate  # noqa: E402


def test_rotation_keeps_only_differences_of_position():
    """(R_a q)·(R_b k) depends on b - a alone, along every axis."""
    grid = TokenGrid(4, 5, 6)
    generator = torch.manual_seed(0)
    q, k = (torch.randn(1, 128, generator=generator).expand(120, -1) for _ in "qk")
    angles = model_angles(MODELS["wan2.1"], grid, 0)
    turned = [rotate(x, angles, "interleaved").view(4, 5, 6, 128) for x in (q, k)]
    for shift in ((1, 0, 0), (0, 2, 0), (0, 0, 3), (1, 1, 1)):
        t, h, w = shift
        products = (turned[0][: 4 - t, : 5 - h, : 6 - w] * turned[1][t:, h:, w:]).sum(-1)
        torch.testing.assert_close(products, products.flatten()[0].expand_as(products))


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("text", [0, 7])
def test_rotation_against_complex_numbers(model, text):
    model, grid = MODELS[model], TokenGrid(3, 4, 5)
    x = torch.randn(60 + text, 128, generator=torch.manual_seed(0))
    angles = model_angles(model, grid, 3)
    found = rotate(x, angles, model.rotary)
    values = x[:60].double().numpy()
    if model.rotary == "interleaved":
        pairs = values[:, 0::2] + 1j * values[:, 1::2]
    else:
        pairs = values[:, :64] + 1j * values[:, 64:]
    pairs = pairs * np.exp(1j * angles.numpy())
    expected = np.empty((60, 128))
    if model.rotary == "interleaved":
        expected[:, 0::2], expected[:, 1::2] = pairs.real, pairs.imag
    else:
        expected[:, :64], expected[:, 64:] = pairs.real, pairs.imag
    np.testing.assert_allclose(found[:60].numpy(), expected, atol=1e-5)
    assert (found[60:] == x[60:]).all()


def test_axial_angles():
    angles = axial_angles(TokenGrid(2, 3, 4), (4, 2, 2), 100.0).view(2, 3, 4, 4)
    assert angles[1, 2, 3].tolist() == pytest.approx([1.0, 0.1, 2.0, 3.0])
    hunyuan = model_angles(MODELS["hunyuan"], TokenGrid(2, 2, 2), 5)
    assert hunyuan.shape == (8, 64)
    with pytest.raises(InputError, match="even"):
        axial_angles(TokenGrid(1, 1, 1), (3, 2, 2), 10.0)
    with pytest.raises(InputError, match="no head 40"):
        model_angles(MODELS["wan2.1"], TokenGrid(1, 1, 1), 40)
    with pytest.raises(InputError, match="don't fit"):
        rotate(torch.zeros(8, 64), hunyuan, "interleaved")


def test_ltx_deals_frequencies_out_over_heads():
    """Head h owns frequencies near (π/2)·θ^(h/32); the two pads turn nothing."""
    ltx, grid = MODELS["ltx2"], TokenGrid(3, 4, 5)
    first, last = (model_angles(ltx, grid, head).view(3, 4, 5, 64) for head in (0, 31))
    assert (first[..., :2] == 0).all()
    # Frame 0 is one frame of the clip: its middle is half a frame, of 20 s.
    assert first[0, 0, 0, 2].item() == pytest.approx(math.pi / 2 * (2 * 0.5 / 24 / 20 - 1))
    assert first[2, 0, 0, 2].item() == pytest.approx(math.pi / 2 * (2 * 13 / 24 / 20 - 1))
    assert first[0, 0, 0, 3].item() == pytest.approx(math.pi / 2 * (2 * 16 / 2048 - 1))
    assert last[0, 0, 0, 63].item() == pytest.approx(math.pi / 2 * 1e4 * (2 * 16 / 2048 - 1))


def test_against_diffusers():
    """The tables that diffusers' transformers make for the same latents."""
    pytest.importorskip("diffusers")
    from diffusers.models.transformers import (
        transformer_hunyuan_video as hunyuan,
    )
    from diffusers.models.transformers import (
        transformer_ltx2 as ltx,
    )
    from diffusers.models.transformers import (
        transformer_wan as wan,
    )

    grid = TokenGrid(3, 4, 5)
    latents = torch.zeros(1, 16, 3, 8, 10)
    for name, module in (
        ("wan2.1", wan.WanRotaryPosEmbed(128, (1, 2, 2), 1024)),
        ("hunyuan", hunyuan.HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56], 256.0)),
    ):
        cos, sin = (table.reshape(60, 128)[:, ::2] for table in module(latents))
        angles = model_angles(MODELS[name], grid, 0)
        torch.testing.assert_close(angles.cos(), cos.double(), atol=1e-5, rtol=0)
        torch.testing.assert_close(angles.sin(), sin.double(), atol=1e-5, rtol=0)
    module = ltx.LTX2AudioVideoRotaryPosEmbed(4096, rope_type="split", num_attention_heads=32)
    coordinates = module.prepare_video_coords(1, 3, 4, 5, torch.device("cpu"), fps=24.0)
    cos, sin = module(coordinates)
    for head in (0, 13, 31):
        angles = model_angles(MODELS["ltx2"], grid, head)
        # Angles of up to 1.6e4 turns in float32 there, in float64 here.
        torch.testing.assert_close(angles.cos(), cos[0, head].double(), atol=3e-3, rtol=0)
        torch.testing.assert_close(angles.sin(), sin[0, head].double(), atol=3e-3, rtol=0)
