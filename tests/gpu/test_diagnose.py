"""`wavealign diagnose`, and the trajectories that it looks at."""

import json

import numpy as np
import pytest
import session_oracles as oracle
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

from wavealign.cli import main  # noqa: E402
from wavealign.errors import InputError  # noqa: E402
from wavealign.gpu.importance import diagnostics  # noqa: E402
from wavealign.qk import TokenGrid, token_order  # noqa: E402
from wavealign.qk.sources import TensorSource, save_qk  # noqa: E402
from wavealign.qk.trajectory import (  # noqa: E402
    NOISE,
    CapturedTrajectory,
    NoisyTrajectory,
    synthetic_qk,
)

GRID = TokenGrid(2, 6, 8)
AWAY = np.abs(np.arange(96)[:, None] - np.arange(96))


def run(*arguments):
    return CliRunner().invoke(main, ["diagnose", *map(str, arguments)])


def rows(*arguments):
    result = run(*arguments, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As `wavealign capture` leaves it: layers 3 and 7, heads 0 and 5, steps 0, 2 and 4."""
    path = tmp_path_factory.mktemp("capture")
    made = NoisyTrajectory(synthetic_qk(GRID, 4, 16, seed=3), 5)
    for step in (0, 2, 4):
        for i, layer in enumerate((3, 7)):
            pairs = [made.read(step, (0, 2 * i + h)) for h in range(2)]
            q, k = (torch.stack(x) for x in zip(*pairs, strict=True))
            about = {"step": str(step), "layer": str(layer), "heads": "0,5", "grid": str(GRID)}
            save_qk(path / f"step{step:03d}_layer{layer:02d}.safetensors", q, k, about)
    return path


def test_a_capture_by_layer_head_and_step(folder):
    found = rows("--qk", folder)
    places = [(r["step"], r["layer"], r["head"]) for r in found]
    assert places == [(s, a, h) for s in (0, 2, 4) for a in (3, 7) for h in (0, 5)]
    with CapturedTrajectory.open(folder) as captured:
        assert (captured.steps, captured.grid) == ((0, 2, 4), GRID)
        for row in found:
            q, k = captured.read(row["step"], (row["layer"], row["head"]))
            entropy, distance = oracle.diagnose(q.numpy(), k.numpy(), AWAY)
            assert row["entropy_nats"] == pytest.approx(entropy, rel=1e-5)
            assert row["distance"] == pytest.approx(distance, rel=1e-5)
            assert row["distance_frac"] == pytest.approx(distance / AWAY.mean(), rel=1e-5)
            assert (row["schema"], row["rows"]) == ("wavealign.diagnosis/1", 96)


def test_chosen_steps_heads_and_rows(folder):
    found = rows("--qk", folder, "--steps", "2,4", "--heads", "1,2", "--rows", "12")
    assert [(r["step"], r["layer"], r["head"]) for r in found] == [
        (2, 3, 5), (2, 7, 0), (4, 3, 5), (4, 7, 0),
    ]  # fmt: skip
    with CapturedTrajectory.open(folder) as captured:
        q, k = captured.read(4, (7, 0))
    sampled = np.arange(12) * 8 + 4
    scores = oracle.softmax_scores(q.numpy(), k.numpy())[sampled]
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert found[-1]["rows"] == 12
    assert found[-1]["entropy_nats"] == pytest.approx(-(shares * np.log(shares)).sum(-1).mean())
    assert found[-1]["distance"] == pytest.approx((shares * AWAY[sampled]).sum(-1).mean())


def test_chosen_layers(folder):
    found = rows("--qk", folder, "--layers", "7", "--steps", "2")
    assert [(r["step"], r["layer"], r["head"]) for r in found] == [(2, 7, 0), (2, 7, 5)]
    assert found == rows("--qk", folder, "--steps", "2")[2:]


def test_distance_in_an_order_or_on_the_grid(folder):
    file = folder / "step004_layer03.safetensors"
    with CapturedTrajectory.open(file) as captured:
        q, k = (x.numpy() for x in captured.read(4, (3, 0)))
    (hilbert, _), (grid, _) = (
        rows("--qk", file, "--order", "hilbert"),
        rows("--qk", file, "--distance", "grid"),
    )
    order = token_order("hilbert", GRID)
    entropy, distance = oracle.diagnose(q[order], k[order], AWAY)
    assert hilbert["distance"] == pytest.approx(distance, rel=1e-5)
    places = np.stack(np.unravel_index(np.arange(96), GRID.shape), -1)
    away = np.linalg.norm(places[:, None] - places[None], axis=-1)
    entropy, distance = oracle.diagnose(q, k, away)
    assert grid["distance"] == pytest.approx(distance, rel=1e-5)
    assert grid["entropy_nats"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("count", [None, 1, 5, 7])
def test_distance_of_uniform_attention(count):
    """The closed form against all distances."""
    q, k = torch.zeros(7, 4), torch.randn(7, 4)
    found = diagnostics.diagnose_head(q, k, rows=count)
    chosen = np.arange(7) if count is None else (np.arange(count) * 2 + 1) * 7 // (2 * count)
    away = np.abs(chosen[:, None] - np.arange(7)).mean()
    assert found.distance == pytest.approx(away)
    assert found.distance_frac == pytest.approx(1)
    alone = diagnostics.diagnose_head(q[:1], k[:1])
    assert (alone.distance, alone.distance_frac) == (0, 0)


def test_uniform_attention_is_the_unit():
    q, k = torch.zeros(96, 8), torch.randn(96, 8)
    found = diagnostics.diagnose_head(q, k)
    assert found.entropy_nats == pytest.approx(np.log(96))
    assert found.distance_frac == pytest.approx(1)


def test_a_made_trajectory_falls(tmp_path):
    source = synthetic_qk(GRID, 4, 64, seed=1)
    made = NoisyTrajectory(source, 20)
    assert made.noise_level(0) == pytest.approx(0.9)
    assert made.noise_level(19) == 0
    for x, content in zip(made.read(19, (0, 2)), source.read(2), strict=True):
        assert torch.equal(x, content)
    at = [made.read(step, (0, 1))[0] for step in (0, 0, 5)]
    assert torch.equal(at[0], at[1])
    # One draw of noise for the whole run: subtracting the content leaves multiples of it.
    content, levels = source.read(1)[0], [made.noise_level(s) for s in (0, 5)]
    noises = [
        (x - np.sqrt(1 - s) * content) / np.sqrt(s) for x, s in zip(at[1:], levels, strict=True)
    ]
    torch.testing.assert_close(noises[0], noises[1], atol=1e-4, rtol=1e-3)
    rms = float(content.square().mean().sqrt())
    assert float(noises[0].std()) == pytest.approx(NOISE * rms, rel=0.05)
    save_qk(tmp_path / "qk.safetensors", source.q, source.k, {"grid": str(GRID)})
    found = rows("--qk", tmp_path / "qk.safetensors", "--trajectory", "20")
    assert sorted({r["step"] for r in found}) == [0, 4, 8, 11, 15, 19]
    for head in range(4):
        own = [r for r in found if r["head"] == head]
        for name in ("entropy_nats", "distance"):
            values = [r[name] for r in own]
            assert values == sorted(values, reverse=True), (head, name)


def test_table_and_picture(folder, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "d.png"
    result = run("--qk", folder, "--plot", picture, "--quiet")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["step", "layer", "heads", "entropy", "spread", "distance",
                                "of", "uniform"]  # fmt: skip
    assert len(lines) == 9  # three steps of two layers
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.png"
    run("--qk", folder, "--plot", again, "--quiet")
    assert again.read_bytes() == picture.read_bytes()
    each = run("--qk", folder, "--per-head", "--quiet").stdout.splitlines()
    assert len(each) == 15


def test_an_interruption_keeps_what_is_done(folder, monkeypatch):
    real, calls = diagnostics.diagnose_head, []

    def some(*arguments, **named):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(diagnostics, "diagnose_head", some)
    result = run("--qk", folder, "--json", "--quiet")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 3
    assert "interrupted after 3 of 12" in result.stderr


def test_bad_input(folder, tmp_path):
    file = folder / "step000_layer03.safetensors"
    for arguments, message in (
        ([], "give --qk FILE, --qk FOLDER or --clip FILE"),
        (["--qk", tmp_path], "holds no .safetensors"),
        (["--qk", tmp_path / "no.safetensors"], "no such file"),
        (["--qk", folder, "--trajectory", "10"], "is a folder"),
        (["--qk", folder, "--steps", "3"], "no step 3; there are 3, 0 to 4"),
        (["--qk", folder, "--heads", "4"], "head 4 doesn't exist; there are 4 (valid: 0-3"),
        (["--qk", folder, "--steps", "x"], "steps 'x' can't be read"),
        (["--qk", folder, "--layers", "9"], "no layer 9; expected some of 3,7"),
        (["--qk", tmp_path / "nowhere"], "nowhere: no such file or folder"),
        (["--qk", folder, "--clip", "x.mp4"], "--qk and --clip both give Q and K"),
        (["--qk", folder, "--distance", "pixels"], "expected tokens or grid"),
        (["--qk", folder, "--grid", "2x6x9"], "expected 96 together"),
        (["--qk", file, "--device", "gpu"], "expected cpu or cuda"),
        (["--qk", file, "--plot", tmp_path / "x.gif"], "unknown picture format"),
        (["--qk", file, "--save-qk", tmp_path / "y.safetensors"], "give one"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.stderr
    broken = torch.full((1, 96, 8), float("nan"))
    save_qk(tmp_path / "nan.safetensors", broken, broken.clone(), {"step": "4", "layer": "2"})
    result = run("--qk", tmp_path / "nan.safetensors")
    assert "q of layer 2, head 0 at step 4 holds NaN" in result.stderr


def test_captures_that_contradict_each_other(folder, tmp_path):
    file = folder / "step000_layer03.safetensors"
    (tmp_path / "a.safetensors").write_bytes(file.read_bytes())
    (tmp_path / "b.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(InputError, match="both hold layer 3, head 0 at step 0"):
        CapturedTrajectory.open(tmp_path)
    x = torch.randn(1, 40, 8)
    save_qk(tmp_path / "b.safetensors", x, x.clone(), {"step": "1"})
    with pytest.raises(InputError, match="different lengths"):
        CapturedTrajectory.open(tmp_path)
    save_qk(tmp_path / "b.safetensors", x, x.clone(), {"step": "one"})
    with pytest.raises(InputError, match=r"b\.safetensors: its metadata can't be used"):
        CapturedTrajectory([tmp_path / "b.safetensors"])
    save_qk(tmp_path / "b.safetensors", x, x.clone(), {"heads": "1,2"})
    with pytest.raises(InputError, match="2 names of 1 heads"):
        CapturedTrajectory([tmp_path / "b.safetensors"])
    save_qk(tmp_path / "b.safetensors", x, x.clone(), {"grid": "2x4x5", "text_tokens": "few"})
    with pytest.raises(InputError, match=r"b\.safetensors: its metadata can't be used .*'few'"):
        CapturedTrajectory([tmp_path / "b.safetensors"])
    assert (
        "text_tokens is 'few'" in run("--qk", tmp_path / "b.safetensors", "--trajectory", 2).stderr
    )
    for step, (grid, text) in enumerate((("2x4x5", 0), ("5x2x4", 0), ("1x5x7", 5))):
        about = {"grid": grid, "text_tokens": str(text), "step": str(step)}
        save_qk(tmp_path / f"grid{step}.safetensors", x, x.clone(), about)
    for other in (1, 2):
        with pytest.raises(InputError, match="where others have 2x4x5 and 0"):
            CapturedTrajectory([tmp_path / f"grid{step}.safetensors" for step in (0, other)])
    with pytest.raises(InputError, match="no files"):
        CapturedTrajectory([])
    with pytest.raises(InputError, match="at least 2"):
        NoisyTrajectory(TensorSource(x, x), 1)
