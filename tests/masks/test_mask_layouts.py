"""Masks that other programs write, and the way back."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import scipy.sparse
from click.testing import CliRunner
from helpers import dense_masks, random_mask
from hypothesis import HealthCheck, given, settings

from wavealign.cli import main
from wavealign.errors import InputError
from wavealign.masks import BlockMask, load_mask
from wavealign.masks.export import FORMS, export_mask

MASK = random_mask(shape=(2, 5, 7), block=(128, 64), tokens=(600, 430))
DENSE = np.stack([head.to_dense() for head in MASK.heads()])
BLOCK, TOKENS = [128, 64], [600, 430]


def lists(dense, filler, width=None):
    """Counts [..., M] and lists [..., M, width] with a filler behind each row's blocks."""
    width = width or dense.shape[-1]
    index = np.full((*dense.shape[:-1], width), filler, dtype=np.int32)
    for row in np.ndindex(dense.shape[:-1]):
        kept = np.flatnonzero(dense[row])
        index[row][: len(kept)] = kept
    return dense.sum(axis=-1).astype(np.int32), index


def halves(dense):
    """Two disjoint masks whose union is `dense`."""
    coin = np.random.default_rng(1).random(dense.shape) < 0.5
    return dense & coin, dense & ~coin


def flex(dense=DENSE, width=None):
    (pn, pi), (fn, fi) = (lists(d[None], 0, width) for d in halves(dense))
    return {
        "kv_num_blocks": pn, "kv_indices": pi, "full_kv_num_blocks": fn, "full_kv_indices": fi,
        "BLOCK_SIZE": BLOCK, "seq_lengths": TOKENS,
    }  # fmt: skip


def fa4():
    (pn, pi), (fn, fi) = (lists(d[None], 0) for d in halves(DENSE))
    return {
        "mask_block_cnt": pn, "mask_block_idx": pi, "full_block_cnt": fn, "full_block_idx": fi,
        "block_size": BLOCK, "seq_len": TOKENS,
    }  # fmt: skip


def vsa():
    count, index = lists(DENSE[None], -1)
    return {"q2k_num": count, "q2k_index": index, "block_size": BLOCK, "seq_len": TOKENS}


def lut():
    count, index = lists(DENSE[None], 0)
    steps = np.diff(index, axis=-1, prepend=0)
    used = np.arange(7) < count[..., None]
    return {
        "lut": np.where(used, steps, 0).astype(np.int32), "valid_block_num": count,
        "block_size": BLOCK, "seq_len": TOKENS,
    }  # fmt: skip


def flashinfer(one_run=False):
    pointers = MASK.indptr.reshape(-1)
    if one_run:
        rows = np.stack([pointers[:6], pointers[5:]])
    else:
        rows = np.stack([pointers[:6], pointers[5:] - pointers[5]])
    return {"indptr": rows, "indices": MASK.indices, "R": 128, "C": 64, "M": 600, "N": 430}


CASES = {
    "flex": flex, "fa4": fa4, "vsa": vsa, "lut": lut, "flashinfer": flashinfer,
    "flashinfer in one run": lambda: flashinfer(True),
    "flex, compact": lambda: flex(DENSE, int(DENSE.sum(axis=-1).max())),
}  # fmt: skip


def write(path, arrays):
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        save = pytest.importorskip("safetensors.numpy").save_file
        save({n: np.atleast_1d(np.asarray(a)) for n, a in arrays.items()}, path)
    else:
        torch = pytest.importorskip("torch")
        tensors = {
            name: torch.from_numpy(a.copy()) if isinstance(a, np.ndarray) else a
            for name, a in arrays.items()
        }
        torch.save(tensors, path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
@pytest.mark.parametrize("case", CASES)
def test_reads(tmp_path, case, suffix):
    path = tmp_path / f"m{suffix}"
    write(path, CASES[case]())
    loaded = load_mask(path)
    assert loaded.mask.digest == MASK.digest
    assert any(note.startswith("layout: ") for note in loaded.understood_as)


def test_flex_broadcasts_heads(tmp_path):
    write(tmp_path / "m.npz", {**flex(DENSE[:1]), "seq_lengths": TOKENS})
    assert load_mask(tmp_path / "m.npz").mask.shape == (1, 5, 7)
    arrays = fa4()
    arrays["mask_block_cnt"], arrays["mask_block_idx"] = (
        np.zeros((1, 1, 5), np.int32), np.zeros((1, 1, 5, 1), np.int32)
    )  # fmt: skip
    arrays["full_block_cnt"], arrays["full_block_idx"] = lists(DENSE[None], 0)
    write(tmp_path / "m.npz", arrays)
    assert load_mask(tmp_path / "m.npz").mask.digest == MASK.digest


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_block_mask_of_torch_itself(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import create_block_mask

    def near(b, h, q, k):
        return (q - k).abs() < 150 * (h + 1)

    m = create_block_mask(near, 1, 2, 600, 430, device="cpu", BLOCK_SIZE=(128, 64))
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    fields = {name: getattr(m, name) for name in names}
    torch.save(
        {**fields, "BLOCK_SIZE": m.BLOCK_SIZE, "seq_lengths": m.seq_lengths}, tmp_path / "m.pt"
    )
    mask = load_mask(tmp_path / "m.pt").mask
    assert (mask.block_q, mask.block_kv, mask.tokens_q, mask.tokens_kv) == (128, 64, 600, 430)
    distance = np.abs(np.arange(600)[:, None] - np.arange(430)[None, :])
    for h in range(2):
        expected = np.zeros((5, 7), dtype=bool)
        i, j = np.nonzero(distance < 150 * (h + 1))
        expected[i // 128, j // 64] = True
        assert (mask.head(h).to_dense() == expected).all()


def test_scipy(tmp_path):
    head = MASK.select_heads([1])
    matrix = scipy.sparse.csr_array(DENSE[1].astype(np.int8))
    matrix.data[3] = 0  # an explicit zero isn't a block
    scipy.sparse.save_npz(tmp_path / "csr.npz", matrix)
    with pytest.raises(InputError, match=r"block size.*--block"):
        load_mask(tmp_path / "csr.npz")
    found = load_mask(tmp_path / "csr.npz", (128, 64), tokens=(600, 430)).mask
    assert found.nnz == head.nnz - 1
    elements = np.kron(DENSE[1], np.ones((8, 4)))
    matrix = scipy.sparse.bsr_array(elements, blocksize=(8, 4))
    scipy.sparse.save_npz(tmp_path / "bsr.npz", matrix)
    expected = BlockMask.from_dense(DENSE[1], (8, 4))
    assert load_mask(tmp_path / "bsr.npz").mask.digest == expected.digest
    matrix.data[3] = 0  # a block that holds nothing isn't one
    scipy.sparse.save_npz(tmp_path / "zero.npz", matrix)
    fewer = DENSE[1].copy()
    rows, columns = np.nonzero(fewer)
    fewer[rows[3], columns[3]] = False
    found = load_mask(tmp_path / "zero.npz").mask
    assert found.digest == BlockMask.from_dense(fewer, (8, 4)).digest
    with pytest.raises(InputError, match="leave --block out"):
        load_mask(tmp_path / "bsr.npz", (8, 8))
    scipy.sparse.save_npz(tmp_path / "coo.npz", scipy.sparse.coo_array(DENSE[1]))
    with pytest.raises(InputError, match=r"holds .* arrays and no schema"):
        load_mask(tmp_path / "coo.npz", (8, 8))
    scipy.sparse.save_npz(tmp_path / "csc.npz", scipy.sparse.csc_array(DENSE[1]))
    with pytest.raises(InputError, match="'csc'; convert it"):
        load_mask(tmp_path / "csc.npz", (8, 8))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch's own, on making them
@pytest.mark.parametrize("heads", [(), (2,), (1, 2)])
@pytest.mark.parametrize("under", ["", "masks/", "mask"])
@pytest.mark.parametrize("layout", ["bsr", "bsc"])
def test_torch_block_sparse_tensors_are_masks_of_their_blocks(tmp_path, heads, under, layout):
    torch = pytest.importorskip("torch")
    dense = np.stack([DENSE[0], DENSE[0][:, ::-1]])[: 2 if heads else 1]
    elements = np.kron(dense, np.ones((1, 8, 4)))
    tensor = torch.from_numpy(elements).reshape(*heads, *elements.shape[1:])
    tensor = getattr(tensor, f"to_sparse_{layout}")((8, 4))
    tensor.values()[..., 3, :, :] = 0  # a block that holds nothing isn't kept
    torch.save({under.strip("/"): tensor} if under else tensor, tmp_path / "m.pt")
    key = "masks" if under == "masks/" else None
    found = load_mask(tmp_path / "m.pt", key=key).mask
    for h in range(found.H):
        expected = dense[h].copy()
        along = expected if layout == "bsr" else expected.T
        rows, columns = np.nonzero(along)
        along[rows[3], columns[3]] = False
        assert (found.head(h).to_dense() == expected).all()
    assert (found.block_q, found.block_kv) == (8, 4)
    assert (found.tokens_q, found.tokens_kv) == elements.shape[1:]
    with pytest.raises(InputError, match="leave --block out"):
        load_mask(tmp_path / "m.pt", (128, 128), key)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda t, bsr: {"mask": bsr, "block_size": [128, 128]}, "'block_size' twice"),
        (lambda t, bsr: {"mask": bsr, "seq_len": [39, 28]}, "'seq_len' twice"),
        (
            lambda t, bsr: t.sparse_bsr_tensor([0, 1], [0], t.ones(1, 8, 4, 3)),
            "expected blocks of numbers",
        ),
        (lambda t, bsr: bsr.to_dense().to("meta"), "on meta, which can't be read"),
        (lambda t, bsr: t.nested.nested_tensor([bsr.to_dense()] * 2), "can't be read"),
    ],
)
def test_torch_tensors_that_are_no_mask(tmp_path, made, message):
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(np.kron(DENSE[0], np.ones((8, 4)))).to_sparse_bsr((8, 4))
    torch.save(made(torch, tensor), tmp_path / "m.pt")
    with pytest.raises(InputError, match=rf"m\.pt: .*{message}"):
        load_mask(tmp_path / "m.pt")


def test_torch_tensors_with_a_negative_bit(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch._neg_view(-torch.from_numpy(DENSE).float()), tmp_path / "m.pt")
    assert load_mask(tmp_path / "m.pt", (128, 64), tokens=(600, 430)).mask.digest == MASK.digest


@pytest.mark.parametrize("made", [flex, fa4])
def test_lists_come_in_pairs(tmp_path, made):
    arrays = made()
    pairs = [name for name in arrays if "full" in name]
    for name in pairs:
        write(tmp_path / "m.npz", {k: a for k, a in arrays.items() if k != name})
        with pytest.raises(InputError, match=f"no '{name}', so blocks would be lost"):
            load_mask(tmp_path / "m.npz")
    write(tmp_path / "m.npz", {k: a for k, a in arrays.items() if k not in pairs})
    notes = load_mask(tmp_path / "m.npz").understood_as
    assert any(f"no '{pairs[0]}': blocks are those of" in note for note in notes)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_of_any_declared_size_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    size = 2**21
    tensor = torch.sparse_coo_tensor([[0], [1]], [True], (size, size))
    torch.save(tensor, tmp_path / "m.pt")
    with pytest.raises(InputError, match=r"m\.pt: holds a sparse tensor .* 2097152 x 2097152"):
        load_mask(tmp_path / "m.pt", (128, 128))


def band(b, h, q, kv):
    return (q - kv).abs() < 300


def test_the_recipe_for_a_pickled_mask_keeps_full_blocks(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import create_block_mask

    m = create_block_mask(band, 1, 1, 1024, 1024, device="cpu", BLOCK_SIZE=64)
    torch.save(m, tmp_path / "pickled.pt")
    with pytest.raises(InputError) as refusal:
        load_mask(tmp_path / "pickled.pt")
    fields = re.findall(r"'(\w+)': m\.(\w+)", str(refusal.value))
    torch.save({name: getattr(m, attribute) for name, attribute in fields}, tmp_path / "m.pt")
    kept = load_mask(tmp_path / "m.pt").mask.head(0).to_dense()
    assert (kept == m.to_dense()[0, 0].bool().numpy()).all()


def test_exported_flex_lists_are_of_one_width(tmp_path):
    """Compiled FlexAttention reads partial and full lists by one width."""
    export_mask(tmp_path / "flex.npz", MASK, "flex")
    with np.load(tmp_path / "flex.npz") as file:
        assert file["kv_indices"].shape == file["full_kv_indices"].shape


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_dense_tensors(tmp_path, suffix):
    path = tmp_path / f"m{suffix}"
    write(path, {"mask_id": DENSE[None]})
    expected = BlockMask.from_dense(DENSE, (64, 128))
    assert load_mask(path, (64, 128)).mask.digest == expected.digest
    with pytest.raises(InputError, match="--block"):
        load_mask(path)
    write(path, {"mask": DENSE, "block_size": np.array(BLOCK), "seq_len": np.array(TOKENS)})
    assert load_mask(path).mask.digest == MASK.digest


def test_torch_files(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "m.pt"
    torch.save(torch.from_numpy(DENSE), path)
    assert load_mask(path, (128, 64), tokens=(600, 430)).mask.digest == MASK.digest
    torch.save({"layer": {"3": torch.from_numpy(DENSE), "4": torch.zeros(2)}}, path)
    assert load_mask(path, (128, 64), "layer/3", tokens=(600, 430)).mask.digest == MASK.digest

    torch.save({"mask": random_mask()}, path)
    with pytest.raises(InputError, match=r"never loaded; if it is a BlockMask"):
        load_mask(path)
    torch.save({"note": ["nothing"]}, path)
    with pytest.raises(InputError, match="has rank 0"):
        load_mask(path, (128, 64))
    torch.save({}, path)
    with pytest.raises(InputError, match="holds no tensor"):
        load_mask(path, (128, 64))
    torch.save({"mask": torch.from_numpy(DENSE)}, path)
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(InputError, match="damaged or no torch file"):
        load_mask(path)
    path.write_bytes(b"hello")
    with pytest.raises(InputError):
        load_mask(path)
    with pytest.raises(InputError, match="no such file"):
        load_mask(tmp_path / "other.pt")


def change(make, **changes):
    arrays = make()
    for name, value in changes.items():
        if value is None:
            del arrays[name]
        else:
            arrays[name] = value(np.array(arrays[name])) if callable(value) else value
    return arrays


def put(where, value):
    def changed(array):
        array[where] = value
        return array

    return changed


def _two_ways():
    return {**flex(), **fa4()}


BAD = {
    "index beyond N": (change(flex, full_kv_indices=lambda a: a + 7), "The sequence length"),
    "index beyond the width": (
        change(flex, seq_lengths=None, kv_indices=lambda a: a + 7), "give --seq-len"
    ),
    "count beyond the width": (change(vsa, q2k_num=put((0, 0, 0), 8)), "counts 8 blocks"),
    "negative count": (change(vsa, q2k_num=put((0, 0, 0), -1)), "counts -1 blocks"),
    "a padded entry in use": (
        change(vsa, q2k_num=lambda a: a * 0 + 7), "K/V block -1; expected 0 to 6"
    ),
    "a block in both lists": (
        change(flex, kv_num_blocks=lambda a: a * 0 + 7, kv_indices=lambda a: a * 0 + np.arange(7)),
        "twice",
    ),
    "counts of another shape": (change(flex, kv_num_blocks=lambda a: a[..., :4]), "one a row"),
    "float lists": (change(flex, kv_indices=lambda a: a * 1.0), "'kv_indices' is float64"),
    "rank": (
        change(flex, kv_indices=lambda a: a.reshape(-1), full_kv_indices=lambda a: a.reshape(-1),
               kv_num_blocks=lambda a: a.reshape(-1), full_kv_num_blocks=lambda a: a.reshape(-1)),
        "expected",
    ),
    "no block size": (change(flex, BLOCK_SIZE=None), r"'BLOCK_SIZE'.*--block"),
    "block size of nothing": (change(flex, BLOCK_SIZE=[0, 64]), "positive"),
    "lut past its end": (change(lut, lut=lambda a: a + 1, ), "runs past its end"),
    "lut of block numbers": (
        {**lut(), "lut": np.tile(np.arange(7), (1, 2, 5, 1)),
         "valid_block_num": np.full((1, 2, 5), 7)},
        "block numbers rather than steps",
    ),
    "lut standing still": (
        {**lut(), "lut": np.zeros((1, 2, 5, 7), int), "valid_block_num": np.full((1, 2, 5), 3)},
        "step of 0",
    ),
    "row pointers": (change(flashinfer, indptr=lambda a: a + 1), "counts .* blocks|ends"),
    "no length": (change(flashinfer, N=None), "--seq-len"),
    "index beyond N, rows": (change(flashinfer, indices=lambda a: a + 7), "expected 0 to 6"),
    "variable": (
        {"block_mask_map": DENSE, "block_row_sz": [1], "block_col_sz": [1]}, "variable sizes"
    ),
    "two ways": (_two_ways(), r"2 ways: flex \(.*\); fa4 \(.*\). Choose with --format"),
    "foreign and native": ({**flex(), "mask": DENSE}, r"flex .*native \('mask'\)"),
    "rows and native": ({**flashinfer(), "shape": [2, 5, 7]}, r"flashinfer .*native \('indptr'\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_content(tmp_path, case):
    arrays, text = BAD[case]
    path = tmp_path / "m.npz"
    if case == "row pointers":
        arrays["indptr"] = arrays["indptr"] * 2
    write(path, arrays)
    with pytest.raises(InputError, match=text) as caught:
        load_mask(path)
    assert str(path) in str(caught.value)


def test_format_settles_ambiguity(tmp_path):
    path = tmp_path / "m.npz"
    write(path, {**_two_ways(), "mask": DENSE})
    for form in ("flex", "fa4"):
        assert load_mask(path, form=form).mask.digest == MASK.digest
    assert load_mask(path, form="native").mask.digest == MASK.digest
    with pytest.raises(InputError, match="isn't SpargeAttn look-up table: it has no 'lut'"):
        load_mask(path, form="sparge-lut")
    with pytest.raises(InputError, match="unknown format"):
        load_mask(path, form="cubes")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25
)
@given(dense_masks(max_heads=2, max_rows=6, max_columns=9))
def test_there_and_back(tmp_path, dense):
    mask = BlockMask.from_dense(dense, (128, 64))
    for form in FORMS:
        if form == "scipy" and mask.H != 1:
            continue
        export_mask(tmp_path / "m.npz", mask, form)
        assert load_mask(tmp_path / "m.npz").mask.digest == mask.digest


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.parametrize(
    "command", [["sim"], ["order", "--policy", "lockstep"], ["curve"], ["guard"]]
)
def test_options_that_errors_name_are_there(tmp_path, command):
    two, compact = tmp_path / "two.npz", tmp_path / "compact.npz"
    write(two, {**_two_ways(), "mask": DENSE})
    write(compact, change(flashinfer, N=None))
    out = ["--out", str(tmp_path / "o.npz")] if command[0] == "order" else []
    for path, told in ((two, "--format"), (compact, "--seq-len")):
        result = run(*command, "--mask", path, *out)
        assert result.exit_code == 2
        assert told in result.output
        assert told in run(*command, "--help").output
    result = run(*command, "--mask", two, *out, "--format", "flex")
    assert result.exit_code == 0, result.output


def test_convert(tmp_path):
    pytest.importorskip("safetensors")
    source, out = tmp_path / "m.npz", tmp_path / "m.safetensors"
    write(source, lut())
    result = run("mask", "convert", source, out, "--to", "fa4", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["mask_digest"] == MASK.digest
    result = run("mask", "convert", out, tmp_path / "n.npz", "--heads", 1)
    assert result.exit_code == 0, result.output
    assert "FlashAttention-4 block lists" in result.stdout
    assert load_mask(tmp_path / "n.npz").mask.digest == MASK.select_heads([1]).digest
    assert run("mask", "info", source, "--format", "sparge-lut").exit_code == 0
    for arguments, text in (
        ((out, tmp_path / "x.safetensors"), "holds text"),
        ((out, tmp_path / "x.txt"), "expected .npz or .safetensors"),
        ((out, tmp_path / "x.npz", "--to", "cubes"), "unknown form"),
        ((out, tmp_path / "x.npz", "--to", "scipy"), "choose one by --heads"),
        ((out, tmp_path / "x.npz", "--seq-len", "100"), "leave --seq-len out"),
    ):
        result = run("mask", "convert", *arguments)
        assert result.exit_code == 2, result.output
        assert text in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.npz", "m.safetensors", "n.npz"]
