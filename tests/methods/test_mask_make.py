"""`wavealign mask make`, `wavealign methods`, recall, and the files that Q and K come from."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from wavealign.cli import main  # noqa: E402
from wavealign.errors import InputError, MissingCapabilityError  # noqa: E402
from wavealign.masks import BlockMask, load_mask, save_mask  # noqa: E402
from wavealign.methods import METHODS, make_mask, params  # noqa: E402
from wavealign.qk import FileSource, TensorSource, TokenGrid  # noqa: E402
from wavealign.report.mask_plot import coverage  # noqa: E402


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def qk():
    generator = torch.manual_seed(0)
    q = torch.randn(3, 600, 16, generator=generator).cumsum(1) / 4
    return q, q + torch.randn(3, 600, 16, generator=generator)


@pytest.fixture
def file(tmp_path, qk):
    path = tmp_path / "qk.safetensors"
    safetensors.save_file({"q": qk[0].bfloat16(), "k": qk[1].bfloat16()}, path)
    return path


GRID = ["--grid", "6x10x10", "--quiet"]


def test_make_writes_what_the_function_makes(tmp_path, file, qk):
    out = tmp_path / "m.npz"
    result = run(
        "mask", "make", "--qk", file, "--method", "xattention", "--set", "threshold=0.8",
        "--set", "block=64", *GRID, "--order", "hilbert", "--heads", "2,0", "--out", out, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    loaded = load_mask(out).mask
    source = TensorSource(qk[0].bfloat16(), qk[1].bfloat16())
    expected = make_mask(
        "xattention", source, params.XAttention(0.8, block=64), heads=[2, 0],
        grid=TokenGrid(6, 10, 10), order="hilbert",
    )  # fmt: skip
    assert loaded.digest == expected.digest == row["mask_digest"]
    assert row["meta"]["parameters"]["threshold"] == 0.8
    assert row["meta"]["qk"] == "qk.safetensors"
    assert row["density"] == pytest.approx(loaded.density)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.npz", "qk.safetensors"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_from_the_command_line(tmp_path, file, method):
    out, size = tmp_path / "m.npz", ["--set", "block=64"]
    if method in ("spargeattn", "random"):
        size = ["--set", "block_q=64", "--set", "block_kv=32"]
    result = run("mask", "make", "--qk", file, "--method", method, *size, *GRID, "--out", out)
    assert result.exit_code == 0, result.output
    assert f"{out}: {method}, 3 heads of 10 x" in result.stdout
    assert result.stderr == ""


def test_make_without_qk_and_with_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "m.npz", tmp_path / "m.png"
    result = run(
        "mask", "make", "--method", "radial", "--size", "81x480x832", "--num-heads", 2,
        "--out", out, "--plot", picture, "--quiet",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert load_mask(out).mask.shape == (2, 256, 256)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "model", "decay"),
    [
        (["--model", "hunyuan"], "hunyuan", 0.95),
        (["--model", "wan2.1-1.3b"], "wan", 0.2),
        (["--model", "ltx2", "--set", "model=wan2.2", "--set", "decay=1"], "wan2.2", 1),
    ],
)
def test_radial_is_that_of_the_model(tmp_path, options, model, decay):
    out = tmp_path / "m.npz"
    result = run("mask", "make", "--method", "radial", "--grid", "3x20x20", *options, "--out", out)
    assert result.exit_code == 0, result.output
    found = load_mask(out).mask.meta["parameters"]
    assert (found["model"], found["decay"]) == (model, decay)


def test_radial_has_no_other_models(tmp_path):
    grid = ["--grid", "3x20x20", "--model", "ltx2", "--out", tmp_path / "m.npz"]
    result = run("mask", "make", "--method", "radial", *grid)
    assert result.exit_code == 2
    assert "model is 'ltx2'; expected wan2.2 or wan or hunyuan" in result.stderr


def test_a_picture_averages_large_masks():

    dense = np.random.default_rng(0).random((1200, 960)) < 0.3
    cells = coverage(BlockMask.from_dense(dense).head(0))
    assert cells.shape == (480, 480)
    np.testing.assert_allclose(cells[0, 0], dense[:3, :2].mean())
    assert (coverage(BlockMask.from_dense(dense[:40, :30]).head(0)) == dense[:40, :30]).all()


def test_recall(tmp_path, file, qk):
    out = tmp_path / "m.npz"
    run(
        "mask", "make", "--qk", file, "--method", "exact", "--set", "mass=0.7", "--set", "block=50",
        *GRID, "--order", "hilbert", "--heads", "2,0", "--out", out,
    )  # fmt: skip
    result = run("mask", "info", out, "--qk", file, "--per-head", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    total, *each = (json.loads(line)["recall_frac"] for line in result.stdout.splitlines())
    assert total == pytest.approx(np.mean(each))
    assert all(0.7 <= recall < 1 for recall in each)
    # Of one head alone, and in the table.
    result = run("mask", "info", out, "--qk", file, "--heads", 1, "--quiet")
    assert f"{each[1]:.3f}" in result.stdout
    assert "recall" in result.stdout
    # A file of fewer heads remembers which they were.
    run("mask", "convert", out, tmp_path / "one.npz", "--heads", 1)
    assert load_mask(tmp_path / "one.npz").mask.meta["heads"] == [0]
    # Recall by hand: head 0 of the file is head 1 of the mask.
    mask = load_mask(out).mask
    from wavealign.qk import token_order

    places = token_order("hilbert", TokenGrid(6, 10, 10))
    q, k = (x[0].bfloat16().double()[places] for x in qk)
    attention = (q @ k.T / 4).softmax(-1).numpy()
    token = np.kron(mask.head(1).to_dense(), np.ones((50, 50)))
    assert each[1] == pytest.approx((attention * token).sum() / 600, rel=1e-4)


@pytest.mark.parametrize(("meta", "told"), [
    ({"heads": "0"}, 'heads "0"; expected'), ({"heads": [-1]}, "heads[0] -1;"),
    ({"order": 3}, "order 3;"),
    ({"heads": [9]}, "holds 3 heads"), ({"order": "hilbert"}, "says order hilbert and no grid"),
    ({"order": "hilbert", "grid": [6, 10]}, "grid [6, 10]; expected a list of 3"),
    ({"order": "hilbert", "grid": "6x10"}, "grid '6x10' can't be read"),
    ({"order": "snake", "grid": [6, 10, 10]}, "snake"),
    ({"text_tokens": "many"}, 'text_tokens "many";'),
    ({"parameters": {"causal": 1}}, "parameters.causal 1; expected true or false"),
    ({"parameters": 3}, "3;"),
    ({"parameters": {"tile": [1, 2]}}, "parameters.tile [1, 2];"),
])  # fmt: skip
def test_recall_of_masks_that_say_nothing_of_use(tmp_path, file, meta, told):
    mask = BlockMask.from_dense(np.ones((1, 12, 12), bool), (50, 50), meta=meta)
    save_mask(tmp_path / "m.npz", mask)
    result = run("mask", "info", tmp_path / "m.npz", "--qk", file, "--quiet")
    assert result.exit_code == 2, result.output
    assert told in result.output


def test_recall_of_captured_masks(tmp_path, file):
    """Their meta has the words of the files of Q and K, in which numbers are text."""
    meta = {"grid": "6x10x10", "text_tokens": "0", "heads": [0]}
    save_mask(tmp_path / "m.npz", BlockMask.from_dense(np.ones((1, 12, 12)), (50, 50), meta=meta))
    result = run("mask", "info", tmp_path / "m.npz", "--qk", file, "--json", "--quiet")
    assert json.loads(result.stdout)["recall_frac"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("kind", ["safetensors", "stored", "compressed"])
@pytest.mark.parametrize("batch", [False, True])
def test_files_read_the_same(tmp_path, qk, kind, batch):
    arrays = {name: x[None] if batch else x for name, x in zip("qk", qk, strict=True)}
    path = tmp_path / ("x.safetensors" if kind == "safetensors" else "x.npz")
    if kind == "safetensors":
        safetensors.save_file(arrays, path)
    else:
        save = np.savez if kind == "stored" else np.savez_compressed
        save(path, **{name: x.numpy() for name, x in arrays.items()})
    with FileSource(path) as source:
        assert (source.heads, source.tokens, source.head_dim) == (3, 600, 16)
        for read, x in zip(source.read(1), qk, strict=True):
            assert torch.equal(read, x[1])


def test_half_precision_npz(tmp_path, qk):
    path = tmp_path / "x.npz"
    np.savez(path, q=qk[0].half().numpy(), k=qk[1].half().numpy())
    with FileSource(path) as source:
        assert source.read(2)[0].dtype == torch.float16


def _write(path, **arrays):
    if path.suffix == ".npz":
        np.savez(path, **{name: np.asarray(x) for name, x in arrays.items()})
    else:
        safetensors.save_file({n: torch.tensor(x) for n, x in arrays.items()}, path)


ONES = np.ones((2, 9, 4), dtype=np.float32)
BAD_FILES = {
    "no k": ({"q": ONES}, "has no 'k'; it holds 'q'"),
    "shapes": ({"q": ONES, "k": ONES[:, :8]}, "expected the same"),
    "head_dim": ({"q": ONES, "k": ONES[..., :3]}, "head_dim 4 and k has 3"),
    "integers": ({"q": ONES, "k": ONES.astype(np.int32)}, "'k' is .*; expected bf16"),
    "rank": ({"q": ONES[0], "k": ONES[0]}, r"shape \[9, 4\]"),
    "batch of two": ({"q": ONES[:, None], "k": ONES[:, None]}, r"shape \[2, 1, 9, 4\]"),
}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(tmp_path, case, suffix):
    arrays, text = BAD_FILES[case]
    path = tmp_path / f"x{suffix}"
    _write(path, **arrays)
    with pytest.raises(InputError, match=text) as caught:
        FileSource(path)
    assert str(caught.value).startswith(str(path))


def test_damaged_files(tmp_path, file):
    content = file.read_bytes()
    for share in (0, 0.001, 0.5, 0.99):
        file.write_bytes(content[: int(share * len(content))])
        with pytest.raises(InputError, match="damaged, cut off or no safetensors"):
            FileSource(file)
    for path, text in (
        (tmp_path / "none.safetensors", "no such file"),
        (tmp_path / "none.npz", "no such file"),
        (tmp_path / "x.pt", "expected .safetensors or .npz"),
    ):
        with pytest.raises(InputError, match=text):
            FileSource(path)
    pickled = tmp_path / "x.npz"
    np.savez(pickled, q=np.array([{}]), k=ONES, allow_pickle=True)
    with pytest.raises(InputError, match="pickled"):
        FileSource(pickled)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--method", "xatention"], "Did you mean 'xattention'"),
        (["--method", "xattention", "--set", "tau=1"], "unknown parameter 'tau'"),
        (["--method", "xattention", "--heads", "7"], "head 7 doesn't exist"),
        (["--method", "xattention", "--grid", "6x10"], "can't be read"),
        (["--method", "xattention", "--grid", "6x10x11"], "has 660 tokens"),
        (["--method", "xattention", "--grid", "6x10x10", "--size", "1x16x16"], "one of them"),
        (["--method", "xattention", "--size", "6x10"], "frames, height and width in pixels"),
        (["--method", "xattention", "--model", "sora"], "unknown video model"),
        (["--method", "xattention", "--order", "hilbert"], "needs the token grid"),
        (["--method", "xattention", "--device", "tpu"], "expected cpu or cuda"),
        (["--method", "exact", "--set", "block=1000"], "shorter than a block of 1000"),
    ],
)
def test_bad_usage_writes_nothing(tmp_path, file, arguments, text):
    out = tmp_path / "m.npz"
    result = run("mask", "make", "--qk", file, *arguments, "--out", out, "--quiet")
    assert result.exit_code == 2
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["qk.safetensors"]


def test_what_is_missing(tmp_path, monkeypatch):
    out = tmp_path / "m.npz"
    result = run("mask", "make", "--method", "exact", "--out", out)
    assert result.exit_code == 2
    assert "--qk FILE" in result.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("mask", "make", "--method", "random", "--device", "cuda", "--out", out)
    assert result.exit_code == 3
    assert "no CUDA GPU" in result.stderr

    def missing(module, extra, purpose):
        raise MissingCapabilityError(f"{purpose}: pip install 'wavealign[{extra}]'")

    monkeypatch.setattr("wavealign._extras.require", missing)
    result = run("mask", "make", "--method", "random", "--out", out)
    assert result.exit_code == 3
    assert "wavealign[methods]" in result.stderr


def test_an_interrupt_leaves_nothing(tmp_path, file, monkeypatch):
    import wavealign.methods.exact as module

    real = module.exact

    def second_head_is_interrupted(q, k, p, context):
        if context.head == 1:
            raise KeyboardInterrupt
        return real(q, k, p, context)

    monkeypatch.setattr(module, "exact", second_head_is_interrupted)
    result = run("mask", "make", "--qk", file, "--method", "exact", "--out", tmp_path / "m.npz")
    assert result.exit_code == 1
    assert "interrupted after 1 of 3 heads; nothing was written" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["qk.safetensors"]


def test_methods_lists_them():
    rows = [json.loads(line) for line in run("methods", "--json").stdout.splitlines()]
    assert [row["name"] for row in rows] == list(METHODS)
    assert rows[0]["params"]["threshold"] == 0.9
    text = run("methods", "window").stdout
    assert "--set tile=6x8x8" in text
    assert "clamped at the borders" in text
    assert "radial" in run("methods").stdout
    assert run("methods", "nothing").exit_code == 2


def test_recall_of_other_qk(tmp_path, file):
    out = tmp_path / "m.npz"
    run("mask", "make", "--method", "random", "--grid", "3x20x20", "--out", out)
    result = run("mask", "info", out, "--qk", file, "--quiet")
    assert result.exit_code == 2
    assert "holds 600 tokens; the mask is of 1200 queries" in result.stderr
