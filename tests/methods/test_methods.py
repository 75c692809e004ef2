"""The methods against their definitions (tests/method_oracles.py), and what goes wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import method_oracles as oracles
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from wavealign.errors import InputError  # noqa: E402
from wavealign.methods import METHODS, head_mask, head_masks, make_mask, params  # noqa: E402
from wavealign.methods.context import HeadContext  # noqa: E402
from wavealign.methods.diagonals import representatives  # noqa: E402
from wavealign.methods.exact import block_mass, recall  # noqa: E402
from wavealign.methods.select import select_top_k, top_p  # noqa: E402
from wavealign.methods.settings import parse_settings  # noqa: E402
from wavealign.methods.xattention import antidiagonal_scores, pad_multiple  # noqa: E402
from wavealign.qk import TensorSource, TokenGrid, token_order  # noqa: E402


def smooth(tokens, dim=16, seed=0):
    """Q and K that drift along the sequence, as neighbours in a video do, float64 (L, D)."""
    rng = np.random.default_rng(seed)
    walk = np.cumsum(rng.normal(size=(tokens, dim)), axis=0) / 8
    return walk + rng.normal(size=(tokens, dim)) / 2, walk + rng.normal(size=(tokens, dim)) / 2


def tensors(*arrays, dtype=torch.float32):
    return tuple(torch.from_numpy(a).to(dtype) for a in arrays)


@pytest.mark.parametrize("stride", [4, 8])
@pytest.mark.parametrize("tokens", [512, 500])
def test_xattention_is_antidiagonal_sums(stride, tokens):
    q, k = smooth(tokens)
    p = params.XAttention(0.8, stride, block=32, pad_to=64, padded_keys=False, forced_column=False)
    pad = ((0, -tokens % 64), (0, 0))
    q[tokens:], k[tokens:] = 0, 0
    real = tokens // stride + (tokens % stride > 0)
    score = oracles.antidiagonal(np.pad(q, pad), np.pad(k, pad), stride, 32, real)
    found = antidiagonal_scores(*tensors(q, k), p).numpy()
    rows = tokens // 32  # the ragged row's padding queries count as nothing, here and upstream
    np.testing.assert_allclose(found[:rows], score[:rows], rtol=2e-4, atol=1e-5)
    keep = head_mask("xattention", *tensors(q, k), p).numpy()
    expected = np.array([oracles.keep_top_p(row, 0.8, inclusive=True) for row in score[:rows]])
    assert (keep[:rows] == expected[:, : keep.shape[1]]).all()


def test_xattention_accidents():
    q, k = tensors(*smooth(500))
    q, k = q / 8, k / 8
    clean = params.XAttention(0.6, 4, 32, pad_to=2048, padded_keys=False, forced_column=False)
    forced = dataclasses.replace(clean, forced_column=True)
    padded = dataclasses.replace(clean, padded_keys=True)
    masks = [head_mask("xattention", q, k, p) for p in (clean, forced, padded)]
    assert not masks[0][:, 0].all()
    assert masks[1][:, 0].all()
    assert (masks[1][:, 1:] == masks[0][:, 1:]).all()
    assert (masks[2] != masks[0]).any()  # zero keys take mass
    causal = head_mask("xattention", q, k, dataclasses.replace(clean, causal=True))
    assert (causal == causal.tril()).all()
    assert causal[:, 0].all()
    assert causal.diagonal().all()


@pytest.mark.parametrize(
    ("tokens", "multiple"), [(100, 2048), (32_760, 8192), (75_600, 2048), (363_600, 2048)]
)
def test_xattention_pads_as_upstream(tokens, multiple):
    assert pad_multiple(tokens) == multiple


@pytest.mark.parametrize("tokens", [512, 490])
@pytest.mark.parametrize(("select", "value"), [("top-k", 0.3), ("cdf", 0.8)])
def test_spargeattn(tokens, select, value):
    q, k = smooth(tokens)
    setting = {"topk": value} if select == "top-k" else {"cdf": value}
    for theta, dense_tail in ((0.35, True), (-0.1, False)):
        p = params.SpargeAttn(
            select, similarity=theta, block_q=32, block_kv=16, dense_tail=dense_tail, **setting
        )
        expected = oracles.spargeattn(q, k, 32, 16, theta, select, value, dense_tail)
        assert 0 < expected.mean() < 1
        assert (head_mask("spargeattn", *tensors(q, k), p).numpy() == expected).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [384, 370])
def test_minference_lines(tokens, causal):
    q, k = smooth(tokens)
    positions = representatives(tokens, 16, "auto", causal).numpy()
    p = params.MInference(
        verticals=9, slashes=60, sink=3, band=5, queries=16, block=16, causal=causal
    )
    expected = oracles.vertical_slash(q, k, positions, 16, 9, 60, 3, 5, causal)
    assert 0.1 < expected.mean() < 0.9
    assert (head_mask("minference", *tensors(q, k), p).numpy() == expected).all()


def test_minference_a_shape_and_block_sparse():
    q, k = smooth(300)
    token = np.abs(np.arange(300)[:, None] - np.arange(300)[None, :]) < 40
    token[:, :20] = True
    i, j = np.nonzero(token)
    expected = np.zeros((19, 19), dtype=bool)
    expected[i // 16, j // 16] = True
    p = params.MInference("a-shape", n_init=20, n_local=40, block=16)
    assert (head_mask("minference", *tensors(q, k), p).numpy() == expected).all()
    p = params.MInference("block-sparse", topk=0, ratio=0.3, padded_mean=False, block=16)
    score = oracles.means(q, 16) @ oracles.means(k, 16).T
    kept = head_mask("minference", *tensors(q, k), p).numpy()
    for row, chosen in zip(score, kept, strict=True):
        assert set(np.flatnonzero(chosen)) == set(np.argsort(-row)[: round(0.3 * 19)])


def test_flexprefill_lines_and_query_aware_heads():
    q, k = smooth(512)
    positions = representatives(512, 16, "strided", causal=False).numpy()
    p = params.FlexPrefill(0.6, tau=0.0, min_budget=32, block=16)
    expected = oracles.flexprefill_lines(q, k, positions, 16, 0.6, 2)
    found = head_mask("flexprefill", *tensors(q, k), p).numpy()
    assert 0.2 < expected.mean() < 0.9
    assert (found == expected).all()
    # tau 1 makes every head query-specific: least budgets, and a budget over all rows.
    p = params.FlexPrefill(0.6, tau=1.0, min_budget=16, block=16)
    found = head_mask("flexprefill", *tensors(q, k), p).numpy()
    share = oracles.softmax(oracles.means(q, 16) @ oracles.means(k, 16).T / 4).ravel()
    ranks = np.argsort(-share, kind="stable")
    aware = np.zeros(share.size, dtype=bool)
    aware[ranks[np.cumsum(share[ranks]) <= 0.6 * 32]] = True
    assert (found == (aware.reshape(32, 32) | np.eye(32, dtype=bool) | (np.arange(32) == 0))).all()


@pytest.mark.parametrize("causal", [False, True])
def test_exact_is_dense_attention(causal):
    q, k = smooth(330)
    expected = oracles.block_mass(q, k, 32, causal)
    found = block_mass(*tensors(q, k), 32, 32, causal)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-6)
    p = params.Exact(mass=0.7, block=32, causal=causal)
    keep = head_mask("exact", *tensors(q, k), p)
    rows = [oracles.keep_top_p(row, 0.7, inclusive=True) for row in expected]
    assert (keep.numpy() == np.array(rows)).all()
    kept = recall(found, keep, 330, 32)
    dense = oracles.dense_attention(q, k, causal)
    token = np.kron(np.array(rows), np.ones((32, 32)))[:330, :330]
    assert kept == pytest.approx((dense * token).sum() / 330, rel=1e-5)
    assert 0.7 <= kept < 1


def test_exact_across_chunks(monkeypatch):
    """Many small pieces give what one large one gives."""
    import wavealign.methods.exact as module

    q, k = tensors(*smooth(700))
    whole = block_mass(q, k, 32, 32)
    monkeypatch.setattr(module, "_SUMS_BYTES", 4 * 22 * 64)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * 64 * 96)
    torch.testing.assert_close(block_mass(q, k, 32, 32), whole)
    causal = oracles.block_mass(*(x.double().numpy() for x in (q, k)), 32, causal=True)
    np.testing.assert_allclose(block_mass(q, k, 32, 32, causal=True), causal, rtol=1e-4, atol=1e-6)


def test_text_is_dense_where_the_method_says_so():
    q, k = smooth(340)
    context = HeadContext(0, 340, text_tokens=30)
    keep = head_mask("exact", *tensors(q, k), params.Exact(mass=0.1, block=32), context)
    assert keep[310 // 32 :].all()
    assert keep[:, 310 // 32 :].all()
    p = params.Exact(mass=0.1, block=32, dense_text=False)
    assert not head_mask("exact", *tensors(q, k), p, context)[:, -1].all()


@pytest.mark.parametrize("name", ["wan", "wan2.2", "hunyuan"])
@pytest.mark.parametrize("grid", [(7, 12, 16), (9, 10, 14)])
@pytest.mark.parametrize("text", [0, 70])
def test_radial(name, grid, text):
    found = make_mask(
        "radial", None, params.Radial(0.3, name), grid=TokenGrid(*grid), text_tokens=text
    )
    expected = oracles.radial(grid, 0.3, 64 if name == "wan2.2" else 128, name != "hunyuan", text)
    assert (found.head(0).to_dense() == expected).all()


def test_radial_without_its_accidents():
    """A last block of 24 tokens counts its own queries; frames keep blocks that they end in."""
    p = params.Radial(dense_tail=False)
    mask = make_mask("radial", None, p, grid=TokenGrid(9, 30, 20))
    assert mask.tokens_q % 128 == 24
    assert 0 < mask.head(0).row_nnz[-1] < 43
    whole = make_mask(
        "radial", None, dataclasses.replace(p, cut_frames=False), grid=TokenGrid(9, 30, 20)
    )
    lost = whole.head(0).to_dense() & ~mask.head(0).to_dense()
    assert lost.any()
    assert (whole.head(0).to_dense() >= mask.head(0).to_dense()).all()
    # Frames 1 and 2 meet 6 blocks, of which the last has 48 and 8 of their tokens.
    assert set(np.flatnonzero(lost.any(axis=0))) >= {9}


RADIAL = {  # upstream's own masks, radial_attn/attn_mask.py::gen_log_mask_shrinked of 72788d4,
    # run on a CPU (torch 2.13) on 2026-12-01: sha256 of the packed bits, density, shortest and
    # longest row. It has blocks of s // block, text included: a ragged last block isn't there.
    ("wan", 18, 48, 80, 0): ("0ef2058445758131", 0.287, 92, 162),
    ("wan2.2", 9, 32, 20, 0): ("9c1d0c6dce03a717", 0.653, 38, 71),
    ("hunyuan", 9, 32, 20, 0): ("dbe9f7d79959fc1d", 0.745, 26, 41),
    ("hunyuan", 40, 16, 16, 0): ("6496204486f89adf", 0.390, 22, 34),
    ("wan", 12, 30, 20, 256): ("e49e687b601dff0d", 0.634, 21, 58),
    ("hunyuan", 12, 30, 20, 256): ("f286af788dc4c17c", 0.661, 23, 58),
    ("wan2.2", 21, 30, 52, 256): ("b2db1ab95f53768e", 0.391, 112, 515),
    ("hunyuan", 33, 30, 52, 256): ("c9efb3caf1bee3a8", 0.317, 85, 404),
}


@pytest.mark.parametrize("case", RADIAL)
def test_radial_is_upstreams(case):
    """Each model with the decay and block of upstream's scripts."""
    model, *grid, text = case
    p = params.Radial(model=model)
    mask = make_mask("radial", None, p, grid=TokenGrid(*grid), text_tokens=text)
    whole = (math.prod(grid) + text) // p.block
    found = mask.head(0).to_dense()[:whole, :whole]
    lengths = found.sum(axis=1)
    digest = hashlib.sha256(np.packbits(found).tobytes()).hexdigest()[:16]
    told = (digest, round(found.mean(), 3), lengths.min(), lengths.max())
    assert told == RADIAL[case]


def test_radial_has_what_its_model_has():
    assert params.Radial() == params.Radial(0.2, "wan", True, block=128)
    assert params.Radial(model="wan2.2") == params.Radial(0.8, "wan2.2", True, block=64)
    assert params.Radial(model="hunyuan") == params.Radial(0.95, "hunyuan", False, block=128)
    given = params.Radial(0.5, "hunyuan", True, block=64)
    assert (given.decay, given.sink, given.block) == (0.5, True, 64)


@pytest.mark.parametrize("order", ["raster", "tiles", "hilbert"])
def test_window(order):
    grid, tile, size = TokenGrid(5, 7, 9), (2, 3, 4), (3, 2, 1)
    found = make_mask("window", None, params.Window(tile, size, block=16), grid=grid, order=order)
    places = token_order(order, grid, tile)
    expected = oracles.window(grid.shape, places, tile, size, 16)
    assert (found.head(0).to_dense() == expected).all()


@pytest.mark.parametrize(
    ("grid", "tile", "size"),
    [
        ((8, 16, 16), (4, 4, 4), (1, 3, 3)),
        ((6, 16, 40), (6, 8, 10), (1, 1, 3)),
        ((6, 16, 40), (6, 8, 8), (1, 1, 3)),
    ],
)
def test_tiles_of_the_order_are_those_of_the_window(grid, tile, size):
    """A block a tile: a row keeps the tiles of its window, and no more."""
    p = params.Window(tile, size, block=int(np.prod(tile)))
    mask = make_mask("window", None, p, grid=TokenGrid(*grid), order="tiles")
    counts = [n // t for n, t in zip(grid, tile, strict=True)]
    assert (mask.head(0).row_nnz == np.prod(np.minimum(size, counts))).all()


QK_METHODS = [name for name, method in METHODS.items() if method.needs_qk]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("method", QK_METHODS)
def test_a_head_with_nan_or_inf_keeps_everything(method, where, value):
    q, k = (torch.randn(2, 600, 4, 16) for _ in "qk")
    k = k[:, :, :2]
    fine = METHODS[method].params(**({"mass": 0.3} if method == "exact" else {}))
    before = head_masks(method, q, k, fine)
    {"q": q, "k": k}[where][1, 333, 1, 5] = value
    after = head_masks(method, q, k, fine)
    touched = [1] if where == "q" else [2, 3]
    expected = before.clone()
    expected[1, touched] = True
    assert torch.equal(after, expected)
    one = head_mask(method, q[1, :, touched[0]], k[1, :, touched[0] // 2], fine)
    assert one.all()


@pytest.mark.parametrize("method", QK_METHODS)
def test_autocast_changes_no_mask(method):
    sizes = {"block_q": 16, "block_kv": 16} if method == "spargeattn" else {"block": 16}
    few = {"verticals": 30, "slashes": 30, "sink": 1, "band": 1} if method == "minference" else {}
    p = METHODS[method].params(**sizes, **few)
    q, k = torch.randn(2, 1, 1200, 4, 16, generator=torch.manual_seed(5))
    source = TensorSource(*(x[0].transpose(0, 1) for x in (q, k)))
    calls = [
        lambda: head_masks(method, q, k, p),
        lambda: head_mask(method, q[0, :, 0], k[0, :, 0], p),
        lambda: torch.from_numpy(make_mask(method, source, p).head(1).to_dense()),
    ]
    for call in calls:
        wanted = call()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(call(), wanted)


def test_a_causal_head_with_nan_keeps_the_triangle():
    q, k = torch.randn(2, 512, 16)
    k[3] = np.nan
    keep = head_mask("exact", q, k, params.Exact(causal=True))
    assert torch.equal(keep, torch.ones(4, 4).tril().bool())


def test_parameters_of_another_method_are_refused():
    q, k = torch.randn(2, 256, 16)
    for call in (head_mask, lambda *given: head_masks(given[0], q[None], k[None], given[3])):
        with pytest.raises(InputError, match="xattention takes XAttention, not Exact"):
            call("xattention", q, k, params.Exact())


def test_window_as_published():
    """30x48x80 tokens in 6x8x8 tiles: windows of 3x3x3 and 5x5x5 keep 9.0 and 41.7 %."""
    for size, density in ((3, 0.09), (5, 0.4167)):
        p = params.Window(window=(size, size, size), block=384)
        mask = make_mask("window", None, p, grid=TokenGrid(30, 48, 80), order="tiles")
        assert mask.density == pytest.approx(density, abs=5e-4)
        assert len(set(mask.head(0).row_nnz.tolist())) == 1


def test_random_is_as_dense_and_as_spread_as_asked():
    p = params.Random(0.3, 0.4)
    grid = TokenGrid(8, 80, 80)
    mask = make_mask("random", None, p, grid=grid, heads=[0, 1], seed=3)
    lengths = mask.head(0).row_nnz
    assert mask.density == pytest.approx(0.3, abs=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(0.4, abs=0.05)
    assert mask.digest == make_mask("random", None, p, grid=grid, heads=[0, 1], seed=3).digest
    alone = make_mask("random", None, p, grid=grid, heads=[1], seed=3)
    assert (alone.head(0).indices == mask.head(1).indices).all()


def test_the_two_conventions_differ_by_the_crossing_block():
    row = torch.tensor([[0.5, 0.1, 0.3, 0.1]])
    assert top_p(row, 0.7, "inclusive").tolist() == [[True, False, True, False]]
    assert top_p(row, 0.7, "exclusive").tolist() == [[True, False, False, False]]
    assert top_p(row, 0.2, "exclusive").sum() == 1
    assert top_p(row, 1.0, "inclusive").all()
    assert select_top_k(row, 0).sum() == 1
    assert select_top_k(torch.zeros(1, 4), 2).tolist() == [[True, True, False, False]]


QK = [name for name, method in METHODS.items() if method.needs_qk]


@pytest.mark.parametrize("name", QK)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_method_makes_a_mask(name, dtype):
    q, k = tensors(*smooth(500, seed=1), dtype=dtype)
    source = TensorSource(torch.stack([q, k]), torch.stack([k, q]))
    grid = TokenGrid(5, 10, 10)
    mask = make_mask(name, source, heads=[1, 0], grid=grid, order="hilbert")
    assert mask.H == 2
    assert mask.tokens_q == 500
    assert all(head.row_nnz.min() >= 1 for head in mask.heads())
    json.dumps(dict(mask.meta))
    assert mask.meta["heads"] == [1, 0]
    again = make_mask(name, source, heads=[1, 0], grid=grid, order="hilbert")
    assert again.digest == mask.digest


def test_token_order_permutes_queries_and_keys_but_not_text():
    q, k = tensors(*smooth(330))
    grid = TokenGrid(3, 10, 10)
    source = TensorSource(q[None], k[None])
    found = make_mask(
        "exact", source, params.Exact(block=32), grid=grid, order="hilbert", text_tokens=30
    )
    places = torch.from_numpy(token_order("hilbert", grid))
    places = torch.cat([places, torch.arange(300, 330)])
    context = HeadContext(0, 330, grid=grid.shape, text_tokens=30)
    expected = head_mask("exact", q[places], k[places], params.Exact(block=32), context)
    assert (found.head(0).to_dense() == expected.numpy()).all()


def _source(change=None, shape=(1, 300, 8)):
    q, k = torch.randn(shape), torch.randn(shape)
    if change is not None:
        q[0, 7, 2] = change
    return TensorSource(q, k)


BAD_RUNS = {
    "nan": (lambda: make_mask("exact", _source(float("nan"))), "q of head 0 holds NaN.*token 7"),
    "inf": (lambda: make_mask("xattention", _source(float("inf"))), "NaN or inf at token 7"),
    "short": (lambda: make_mask("exact", _source(shape=(1, 100, 8))), "100 tokens are shorter"),
    "shapes": (lambda: TensorSource(torch.ones(1, 9, 4), torch.ones(1, 8, 4)), "expected the same"),
    "grouped": (lambda: TensorSource(torch.ones(4, 9, 4), torch.ones(2, 9, 4)), "grouped"),
    "head_dim": (lambda: TensorSource(torch.ones(1, 9, 4), torch.ones(1, 9, 8)), "head_dim 4"),
    "rank": (lambda: TensorSource(torch.ones(9, 4), torch.ones(9, 4)), r"shape \[9, 4\]"),
    "integers": (lambda: TensorSource(torch.ones(1, 9, 4).int(), torch.ones(1, 9, 4)), "int32"),
    "no qk": (lambda: make_mask("exact", None), "--qk FILE"),
    "no length": (lambda: make_mask("random", None), "--grid"),
    "no grid": (lambda: make_mask("radial", _source()), "token grid"),
    "grid": (lambda: make_mask("exact", _source(), grid=TokenGrid(2, 3, 4)), "has 24 tokens"),
    "order": (lambda: make_mask("exact", _source(), order="hilbert"), "needs the token grid"),
    "text": (lambda: make_mask("exact", _source(), text_tokens=300), "300 text tokens of 300"),
    "method": (lambda: make_mask("xatention", _source()), "Did you mean 'xattention'"),
    "params": (lambda: make_mask("exact", _source(), params.Random()), "takes Exact"),
    "radial order": (
        lambda: make_mask("radial", None, grid=TokenGrid(2, 16, 16), order="hilbert"),
        "order raster",
    ),
    "radial rows": (lambda: make_mask("radial", None, grid=TokenGrid(9, 1, 238)), "cut_frames=f"),
    "radial frame": (lambda: make_mask("radial", None, grid=TokenGrid(9, 9, 9)), "81 tokens a fr"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_runs(case):
    call, text = BAD_RUNS[case]
    with pytest.raises(InputError, match=text):
        call()


BAD_SETTINGS = {
    "xattention": {
        "threshold=0": "above 0", "threshold=1.5": "up to 1", "stride=7": "doesn't divide",
        "threshold=nan": "share", "top_p=both": "inclusive or exclusive", "block=0": "at least 1",
        "causal=maybe": "true or false", "stride=4.5": "whole number", "strid=8": "mean 'stride'",
        "stride": "name=value", "norm=0": "positive", "pad_to=100": "multiple of the block",
    },
    "spargeattn": {"similarity=2": "cosine", "topk=0": "above 0", "select=p": "top-k or cdf"},
    "flexprefill": {"gamma=2": "up to 1", "max_budget=100": "below min_budget", "tau=-1": "from 0"},
    "minference": {"pattern=v": "vertical-slash or", "sink=-1": "0 or more"},
    "exact": {"mass=0": "above 0"},
    "random": {"density=1.1": "up to 1", "spread=3": "0 to 2"},
    "window": {"tile=6x8": "three sizes", "window=0x1x1": "at least 1"},
    "radial": {"model=ltx": "wan or hunyuan", "decay=0": "positive"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "setting"), [(m, s) for m, settings in BAD_SETTINGS.items() for s in settings]
)
def test_bad_settings(method, setting):
    with pytest.raises(InputError, match=BAD_SETTINGS[method][setting]):
        parse_settings(METHODS[method].params, [setting])


def test_settings():
    found = parse_settings(params.XAttention, ["threshold=0.95", "padded-keys=no", "stride=16"])
    assert found == params.XAttention(0.95, 16, padded_keys=False)
    assert parse_settings(params.Window, ["tile=4x4x4"]) == params.Window((4, 4, 4))
    with pytest.raises(InputError, match="set twice"):
        parse_settings(params.Exact, ["mass=0.5", "mass=0.6"])
    q = torch.randn(300, 8)
    with pytest.raises(InputError, match="'last'"):
        head_mask("minference", q, q, params.MInference(representative="strided", causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", QK)
def test_a_gpu_makes_the_same_masks(name):
    """Up to blocks whose scores differ by rounding."""
    pair = [torch.from_numpy(x)[None].half() for x in smooth(3000, 64)]
    masks = [make_mask(name, TensorSource(*pair), device=device) for device in ("cpu", "cuda")]
    different = np.mean(masks[0].head(0).to_dense() != masks[1].head(0).to_dense())
    assert different < 0.01


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        (params.XAttention, {"threshold": "0.9"}, "threshold: '0.9'; expected a number"),
        (params.XAttention, {"block": 128.5}, r"block: 128\.5; expected a whole number"),
        (params.XAttention, {"causal": "no"}, "causal: 'no'; expected True or False"),
        (params.SpargeAttn, {"block_q": 64.0}, "expected a whole number"),
        (params.SpargeAttn, {"select": 0}, "select: 0; expected text"),
        (params.FlexPrefill, {"min_budget": 1.5}, "expected a whole number"),
        (params.MInference, {"block": None}, "expected a whole number"),
        (params.Exact, {"dense_text": None}, "expected True or False"),
        (params.Random, {"density": float("nan")}, "density is nan"),
        (params.Window, {"tile": (6, 8)}, "expected three sizes"),
        (params.Window, {"window": (3, 3.5, 3)}, r"window: 3\.5; expected a whole number"),
        (params.Window, {"tile": 6}, "expected a sequence"),
        (params.Radial, {"decay": "x"}, "decay: 'x'; expected a number"),
        (params.Radial, {"sink": 1}, "expected True or False"),
    ],
)
def test_parameters_of_another_kind_are_refused_where_they_are_made(method, given, message):
    with pytest.raises(InputError, match=message):
        method(**given)


def test_parameters_are_of_their_kind():
    made = params.Window(tile=[np.int64(2), 2, 2], block=np.int32(8))
    assert (made.tile, type(made.block)) == ((2, 2, 2), int)
