from __future__ import annotations

import io
import json
import pickle
import zipfile

import numpy as np
import pytest
from helpers import DATA, dense_masks, random_mask
from hypothesis import HealthCheck, given, settings

from wavealign.errors import InputError
from wavealign.masks import BlockMask, load_mask, save_mask

NATIVE = {"schema": "wavealign.mask/1", "block_size": [128, 64]}


@pytest.fixture
def write(tmp_path):
    def npz(**arrays):
        path = tmp_path / "masks.npz"
        np.savez_compressed(path, **arrays)
        return path

    return npz


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(dense_masks())
def test_every_layout_reads_the_same(tmp_path, dense):
    mask = BlockMask.from_dense(dense, (128, 64))
    layouts = {
        "dense": {"mask": dense},
        "packed": {"mask_packed": np.packbits(dense, axis=-1), "shape": dense.shape},
        "csr": {"indptr": mask.indptr, "indices": mask.indices, "shape": dense.shape},
    }
    for name, arrays in layouts.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, **NATIVE, **arrays)
        assert load_mask(path).mask.digest == mask.digest
    save_mask(tmp_path / "saved.npz", mask)
    assert load_mask(tmp_path / "saved.npz").mask.digest == mask.digest


def test_seq_len_and_meta_survive(tmp_path):
    mask = random_mask(shape=(1, 3, 5), tokens=(300, 600))
    mask = BlockMask(mask.indptr, mask.indices, 1, 3, 5, 128, 128, 300, 600, {"step": 7})
    save_mask(tmp_path / "m.npz", mask)
    again = load_mask(tmp_path / "m.npz").mask
    assert (again.tokens_q, again.tokens_kv, dict(again.meta)) == (300, 600, {"step": 7})


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_bare_arrays_need_only_a_block_size(write, dtype, rank):
    dense = np.random.default_rng(0).random((2, 3, 4, 5)[4 - rank :]) < 0.5
    path = write(layer_12=dense.astype(dtype))
    loaded = load_mask(path, (128, 64))
    assert loaded.mask.digest == BlockMask.from_dense(dense, (128, 64)).digest
    assert "given" in loaded.understood_as[1]
    with pytest.raises(InputError, match=r"doesn't say its block size.*--block"):
        load_mask(path)


def test_npy_and_one_of_several(tmp_path, write):
    dense = np.random.default_rng(0).random((2, 4, 5)) < 0.5
    expected = BlockMask.from_dense(dense).digest
    np.save(tmp_path / "m.npy", dense)
    assert load_mask(tmp_path / "m.npy", (128, 128)).mask.digest == expected
    several = {
        "a/mask_packed": np.packbits(dense, axis=-1),
        "a/shape": dense.shape,
        "b": ~dense,
    }
    path = write(**several)
    assert load_mask(path, (128, 128), "a").mask.digest == expected
    assert load_mask(path, (128, 128), "b").mask.digest == BlockMask.from_dense(~dense).digest
    with pytest.raises(InputError, match=r"no schema.*--key a"):
        load_mask(path, (128, 128))
    with pytest.raises(InputError, match="nothing named 'c'"):
        load_mask(path, (128, 128), "c")


ONES = np.ones((1, 3, 10), dtype=bool)
PACKED = np.packbits(ONES, axis=-1)
CSR = {"indptr": [0, 1, 2, 3], "indices": [0, 1, 2], "shape": [1, 3, 10]}
BAD = {
    "float with fractions": ({"mask": ONES * 0.5}, "float64 and holds 0.5"),
    "nan": ({"mask": np.where(ONES, np.nan, 0)}, "holds nan"),
    "counts": ({"mask": ONES * 3}, "holds 3"),
    "complex": ({"mask": ONES * 1j}, "complex128; expected bool"),
    "rank 1": ({"mask": np.ones(5, dtype=bool)}, "rank 1"),
    "rank 5": ({"mask": np.ones((1,) * 5, dtype=bool)}, "rank 5"),
    "zero rows": ({"mask": np.ones((2, 0, 5), dtype=bool)}, "axis of size 0"),
    "zero in shape": ({"mask_packed": PACKED, "shape": [1, 0, 10]}, "at least 1"),
    "packed without shape": ({"mask_packed": PACKED}, "'mask_packed' but no 'shape'"),
    "packed against shape": ({"mask_packed": PACKED, "shape": [1, 3, 17]}, "packed bytes"),
    "packed little-endian": (
        {"mask_packed": np.packbits(ONES, axis=-1, bitorder="little"), "shape": [1, 3, 10]},
        "beyond the 10 K/V blocks.*big-endian",
    ),
    "packed int64": ({"mask_packed": PACKED.astype(int), "shape": [1, 3, 10]}, "expected uint8"),
    "shape of two": ({"mask_packed": PACKED, "shape": [3, 10]}, "expected 3 whole"),
    "indices out of range": ({**CSR, "indices": [0, 1, 10]}, "K/V block 10; expected 0 to 9"),
    "unsorted indptr": ({**CSR, "indptr": [0, 2, 1, 3]}, "indptr is not sorted"),
    "duplicate in a row": ({**CSR, "indptr": [0, 3, 3, 3], "indices": [4, 2, 4]}, "row 0.*4 twice"),
    "float indices": ({**CSR, "indices": [0.0, 1.0, 2.0]}, "whole numbers"),
    "two layouts": ({**CSR, "mask": ONES}, "one layout"),
    "no mask": ({"notes": [1]}, "holds no mask"),
    "zero block": ({"mask": ONES, "block_size": [0, 128]}, "positive sizes"),
    "block of three": ({"mask": ONES, "block_size": [1, 2, 3]}, "expected 2 whole"),
    "seq_len against block": ({"mask": ONES, "seq_len": [999, 640]}, "999 query tokens"),
    "meta not json": ({"mask": ONES, "meta": "{"}, "not JSON"),
    "other schema": ({"mask": ONES, "schema": "wavealign.mask/9"}, "reads 'wavealign.mask/1'"),
    "pickled": ({"mask": np.array([{"a": 1}], dtype=object)}, "pickled"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_content(write, case):
    arrays, text = BAD[case]
    path = write(**{**NATIVE, **arrays})
    with pytest.raises(InputError, match=text) as caught:
        load_mask(path)
    assert str(path) in str(caught.value)


def test_block_size_against_the_file(write):
    with pytest.raises(InputError, match="128x64, but 128x128 was asked for"):
        load_mask(write(**NATIVE, mask=ONES), (128, 128))


def _torch_archive():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return buffer.getvalue()


FILES = {
    "text": (b"block masks of layer 3\n", "not an npz"),
    "empty": (b"", "an empty file"),
    "pickle": (pickle.dumps(ONES), "not an npz"),
    "json": (json.dumps([1]).encode(), "not an npz"),
    "torch": (_torch_archive(), "torch.save"),
    "object npy": (b"", "pickled"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_of_other_kinds(tmp_path, case):
    content, text = FILES[case]
    path = tmp_path / "m.npz"
    if case == "object npy":
        with path.open("wb") as stream:
            np.save(stream, np.array([None]), allow_pickle=True)
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=text):
        load_mask(path, (128, 128))


def test_missing_and_folder(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_mask(tmp_path / "nothing.npz")
    with pytest.raises(InputError, match="not a file"):
        load_mask(tmp_path)


def test_cut_off_anywhere(tmp_path):
    content = (DATA / "xattention_75600.npz").read_bytes()
    for share in (0.02, 0.5, 0.999):
        path = tmp_path / "cut.npz"
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(InputError, match=r"damaged or cut off|can't be read"):
            load_mask(path)


def test_damaged_member(tmp_path):
    path = tmp_path / "m.npz"
    np.savez_compressed(path, **NATIVE, mask=np.random.default_rng(0).random((1, 90, 90)) < 0.5)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("mask.npy").header_offset
    content[offset + 200 : offset + 260] = b"\xff" * 60
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"'mask' is damaged|'mask': can't be read"):
        load_mask(path)


def test_saving_leaves_nothing_behind_on_failure(tmp_path):
    with pytest.raises(InputError, match="doesn't exist"):
        save_mask(tmp_path / "no" / "m.npz", random_mask())
    with pytest.raises(InputError, match="is a folder"):
        save_mask(tmp_path, random_mask())
    assert list(tmp_path.iterdir()) == []
