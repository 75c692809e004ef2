"""Recording Q and K from a small, randomly initialised WanTransformer3DModel."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from wavealign.cli import main  # noqa: E402
from wavealign.errors import InputError  # noqa: E402
from wavealign.integrations.capture import Wanted, capture_qk  # noqa: E402
from wavealign.masks import load_mask  # noqa: E402
from wavealign.methods import make_mask, params  # noqa: E402
from wavealign.qk import FileSource, TensorSource, TokenGrid  # noqa: E402
from wavealign.qk.rope import axial_angles, rotate  # noqa: E402

CONFIG = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4,
    "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 3,
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
}  # fmt: skip
GRID = TokenGrid(3, 4, 5)


@pytest.fixture(scope="module")
def wan():
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(**CONFIG).eval()


def inputs(timestep, seed=1):
    generator = torch.manual_seed(seed)
    return {
        "hidden_states": torch.randn(2, 4, 3, 8, 10, generator=generator),
        "timestep": torch.tensor([timestep, timestep]),
        "encoder_hidden_states": torch.randn(2, 7, 16, generator=generator),
        "return_dict": False,
    }


@torch.no_grad()
def denoise(model):
    """Three steps with guidance: two calls each."""
    return [
        model(**inputs(timestep, seed))[0] for timestep in (900.0, 500.0, 100.0) for seed in (1, 2)
    ]


def test_records_what_attention_sees_and_changes_nothing(tmp_path, wan):
    plain = denoise(wan)
    with capture_qk(wan, tmp_path, Wanted(layers=[0, 2], heads=[1], steps=[0, 2])) as capture:
        watched = denoise(wan)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    names = [f"step{s:03d}_layer{n:02d}.safetensors" for s in (0, 2) for n in (0, 2)]
    assert [f.name for f in capture.files] == names
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)
    with FileSource(tmp_path / names[0]) as source:
        assert (source.heads, source.tokens, source.head_dim) == (1, 60, 24)
        q, k = source.read(0)
        assert source.about["grid"] == "3x4x5"
        assert source.about["model"] == "WanTransformer3DModel"
    # By hand: the first block's projections, normalised, turned by our own rotary position.
    with torch.no_grad():
        block, state = wan.blocks[0], inputs(900.0)
        hidden = wan.patch_embedding(state["hidden_states"]).flatten(2).transpose(1, 2)
        temb = wan.condition_embedder(state["timestep"], state["encoder_hidden_states"], None)[1]
        shift, scale = (block.scale_shift_table + temb.unflatten(1, (6, -1)).float()).chunk(6, 1)[
            :2
        ]
        normed = block.norm1(hidden.float()) * (1 + scale) + shift
        angles = axial_angles(GRID, (8, 8, 8), 1e4)
        for found, projection, norm in (
            (q, block.attn1.to_q, block.attn1.norm_q),
            (k, block.attn1.to_k, block.attn1.norm_k),
        ):
            head = norm(projection(normed)).unflatten(2, (2, -1))[0, :, 1]
            torch.testing.assert_close(found, rotate(head, angles), atol=1e-5, rtol=1e-4)
    # Nothing is left behind.
    with capture_qk(wan, tmp_path, Wanted(layers=[1], steps=[99])) as capture:
        denoise(wan)
    assert capture.files == []
    assert not wan._forward_pre_hooks
    assert not wan.blocks[0].attn1._forward_pre_hooks


def test_records_masks(tmp_path, wan):
    p = params.Exact(mass=0.5, block=10)
    with capture_qk(wan, tmp_path, Wanted([1], steps=[1], method="exact", params=p)):
        denoise(wan)
    with capture_qk(wan, tmp_path, Wanted([1], steps=[1])):
        denoise(wan)
    with FileSource(tmp_path / "step001_layer01.safetensors") as source:
        q, k = zip(*(source.read(h) for h in range(2)), strict=True)
    expected = make_mask("exact", TensorSource(torch.stack(q), torch.stack(k)), p)
    found = load_mask(tmp_path / "step001_layer01.npz").mask
    assert found.digest == expected.digest
    assert found.meta["layer"] == "1"


def test_bad_requests(tmp_path, wan):
    for wanted, text in (
        (Wanted([3]), "layers 0 to 2"),
        (Wanted([]), "layers 0 to 2"),
        (Wanted([0], heads=[2]), "heads 0 to 1"),
    ):
        with pytest.raises(InputError, match=text), capture_qk(wan, tmp_path, wanted):
            denoise(wan)
    for model, folder, text in (
        (wan, tmp_path / "none", "no such folder"),
        (torch.nn.Linear(1, 1), tmp_path, "no transformer blocks"),
    ):
        with pytest.raises(InputError, match=text), capture_qk(model, folder, Wanted([0])):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_first_frame_that_is_given_has_no_timestep(tmp_path, wan):
    timesteps = torch.zeros(2, GRID.tokens)
    with torch.no_grad(), capture_qk(wan, tmp_path, Wanted(layers=[0])) as capture:
        for timestep in (900.0, 500.0):
            timesteps[:, GRID.height * GRID.width :] = timestep
            wan(**{**inputs(timestep), "timestep": timesteps})
    assert [file.name[:7] for file in capture.files] == ["step000", "step001"]


SCRIPT = f"""
import sys, torch, diffusers
torch.manual_seed(0)
model = diffusers.WanTransformer3DModel(**{CONFIG!r}).eval()
with torch.no_grad():
    for timestep in (900.0, 500.0):
        model(hidden_states=torch.randn(1, 4, 3, 8, 10), timestep=torch.tensor([timestep]),
              encoder_hidden_states=torch.randn(1, 7, 16))
sys.exit(int(sys.argv[1]))
"""


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_a_script_of_the_user(tmp_path):
    script, out = tmp_path / "run.py", tmp_path / "qk"
    script.write_text(SCRIPT)
    out.mkdir()
    result = run("capture", "--layers", "0-1", "--steps", 0, "--out", out, script, 0)
    assert result.exit_code == 0, result.output
    files = [out / f"step000_layer0{n}.safetensors" for n in (0, 1)]
    assert result.stdout.split() == [str(f) for f in files]
    assert "__call__" not in vars(diffusers.ModelMixin)
    # From there to a mask; the file says its grid.
    made = run(
        "mask", "make", "--qk", files[0], "--method", "exact", "--set", "block=10", "--order",
        "hilbert", "--out", tmp_path / "m.npz", "--json", "--quiet",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    meta = json.loads(made.stdout)["meta"]
    assert meta["grid"] == [3, 4, 5]
    assert (meta["model"], meta["layer"], meta["step"]) == ("WanTransformer3DModel", "0", "0")


def test_scripts_that_fail(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    for arguments, code, text in (
        (("--layers", 0, "--out", tmp_path, script, 3), 1, "ended with 3"),
        (("--layers", 0, "--steps", 9, "--out", tmp_path, script, 0), 1, "nothing was recorded"),
        (("--layers", 7, "--out", tmp_path, script, 0), 2, "layers 0 to 2"),
        (("--layers", 0, "--out", tmp_path, tmp_path / "no.py"), 2, "no such script"),
        (("--layers", 0, "--out", tmp_path / "no", script), 2, "no such folder"),
        (("--layers", 0, "--out", tmp_path, "--set", "a=1", script), 2, "is of --method"),
    ):
        result = run("capture", *arguments)
        assert result.exit_code == code, result.output
        assert text in result.stderr


def test_files_of_a_second_run_have_names_of_their_own(tmp_path, wan):
    with capture_qk(wan, tmp_path, Wanted(layers=[0], steps=[1])) as capture:
        denoise(wan)
        denoise(wan)
    names = ["step001_layer00.safetensors", "run1_step001_layer00.safetensors"]
    assert [file.name for file in capture.files] == names
    with FileSource(tmp_path / names[1]) as source:
        assert (source.about["run"], source.about["step"]) == ("1", "1")


def test_timesteps_that_rise_are_refused(tmp_path, wan):
    with torch.no_grad(), capture_qk(wan, tmp_path, Wanted(layers=[0])):
        wan(**inputs(100.0))
        with pytest.raises(InputError, match="timestep 500 after 100"):
            wan(**inputs(500.0))


TWO = f"""
import torch, diffusers
torch.manual_seed(0)
high = diffusers.WanTransformer3DModel(**{CONFIG!r}).eval()
low = diffusers.WanTransformer3DModel(**{CONFIG!r}).eval()
with torch.no_grad():
    for timestep in (900.0, 700.0, 500.0, 300.0):
        model = high if timestep > 600 else low
        model(hidden_states=torch.randn(1, 4, 3, 8, 10), timestep=torch.tensor([timestep]),
              encoder_hidden_states=torch.ones(1, 7, 16))
"""
OTHER = """
ltx = diffusers.LTXVideoTransformer3DModel(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8,
    cross_attention_dim=16, num_layers=2, caption_channels=16)
ltx(hidden_states=torch.randn(1, 60, 4), timestep=torch.tensor([5]))
"""


def test_both_transformers_of_a_run_are_recorded_and_others_refused(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(TWO)
    arguments = ("capture", "--layers", 0, "--steps", "1-3", "--out", tmp_path, script)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    wanted = [str(tmp_path / f"step{step:03d}_layer00.safetensors") for step in (1, 2, 3)]
    assert result.stdout.split() == wanted
    script.write_text(TWO + OTHER)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "LTXVideoTransformer3DModel is called beside WanTransformer3DModel" in result.stderr


@pytest.mark.parametrize(
    ("name", "about", "tokens"),
    [
        ("wan", ("3x5x4", "0"), 60),
        ("ltx", ("3x4x5", "0"), 60),
        ("hunyuan", ("3x4x5", "4"), 64),  # padding isn't recorded
        ("hunyuan_image", ("3x4x5", "5"), 65),
        ("hunyuan15", ("3x4x5", "4"), 64),
        ("framepack", (None, "6"), 91),  # frames of the past come first
    ],
)
def test_files_say_where_video_and_text_are(tmp_path, name, about, tokens):
    import tiny_transformers

    model, inputs = getattr(tiny_transformers, name)()
    layers = range(2 if name in ("wan", "ltx", "hunyuan15") else 1)
    with capture_qk(model, tmp_path, Wanted(layers)) as capture:
        tiny_transformers.forward(model, inputs)
    assert len(capture.files) == len(layers)
    for file in capture.files:
        with FileSource(file) as source:
            assert (source.about.get("grid"), source.about["text_tokens"]) == about
            assert source.tokens == tokens


def test_text_in_front_is_no_text_behind(tmp_path):
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    given = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 16),
        "pooled_projections": torch.randn(1, 8), "timestep": torch.tensor([9.0]),
        "txt_ids": torch.zeros(8, 3), "img_ids": torch.zeros(16, 3),
    }  # fmt: skip
    with torch.no_grad(), capture_qk(model, tmp_path, Wanted([0, 1])) as capture:
        model(**given)
    for file in capture.files:
        with FileSource(file) as source:
            assert source.tokens == 24
            assert not {"grid", "text_tokens"} & set(source.about)


def test_methods_are_told_grid_and_text(tmp_path):
    from tiny_transformers import forward, hunyuan15

    model, inputs = hunyuan15()
    text = params.Exact(mass=0.2, block=8)
    with capture_qk(model, tmp_path, Wanted([1], heads=[0], method="exact", params=text)):
        forward(model, inputs)
    made = load_mask(tmp_path / "step000_layer01.npz").mask.head(0).to_dense()
    assert made.shape == (8, 8)
    assert made[7].all()  # tokens 60 to 63 are text
    assert made[:, 7].all()
    assert not made[:7, :7].all()
    window = params.Window(tile=(1, 2, 5), window=(1, 1, 1), block=10)
    with capture_qk(model, tmp_path, Wanted([0], heads=[1], method="window", params=window)):
        forward(model, inputs)
    made = load_mask(tmp_path / "step000_layer00.npz").mask
    wanted = make_mask("window", None, window, grid=TokenGrid(3, 4, 5), text_tokens=4)
    assert made.select_heads([0]).digest == wanted.digest


def test_a_method_is_checked_before_the_model_runs(tmp_path, wan):
    for wanted, text in (
        (Wanted([0], method="xatention"), "Did you mean 'xattention'"),
        (Wanted([0], method="exact", params=params.XAttention()), "takes Exact, not XAttention"),
    ):
        with pytest.raises(InputError, match=text), capture_qk(wan, tmp_path, wanted):
            pytest.fail("it began")
