"""Files of torch and safetensors that lie, or hold what no mask is: one error names the file."""

from __future__ import annotations

import json
import time
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import random_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign.cli import main
from wavealign.errors import InputError
from wavealign.masks import load_mask

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

MASK = random_mask(shape=(2, 12, 10))
DENSE = torch.from_numpy(np.stack([head.to_dense() for head in MASK.heads()]))


def refused(path, *told, seconds=2):
    started = time.monotonic()
    with pytest.raises(InputError) as problem:
        load_mask(path, (128, 128))
    assert time.monotonic() - started < seconds
    said = str(problem.value)
    assert said.startswith(f"{path}: ")
    assert len(said) < 2001
    for text in told:
        assert text in said


def holding_itself():
    inner: dict = {"mask": DENSE}
    inner["again"] = inner
    return inner


def list_of_itself():
    inner: list = []
    inner.append(inner)
    return inner


def each_twice(depth):
    """Lists that hold one list twice, which holds one twice, ...: 2^depth parts."""
    inner: list = []
    for _ in range(depth):
        inner = [inner, inner]
    return inner


def deep():
    inner: list = [DENSE]
    for _ in range(200):
        inner = [inner]
    return inner


def repeating(*shape):
    return torch.zeros(1, dtype=torch.bool).expand(*shape)


def sparse(rows, columns, layout):
    if layout == "coo":
        return torch.sparse_coo_tensor([[0], [1]], [True], (rows, columns))
    none = torch.zeros(0, dtype=torch.int64)
    if layout == "csr":
        pointers = torch.zeros(rows + 1, dtype=torch.int64)
        return torch.sparse_csr_tensor(pointers, none, torch.zeros(0), (rows, columns))
    pointers = torch.zeros(columns + 1, dtype=torch.int64)
    return torch.sparse_csc_tensor(pointers, none, torch.zeros(0), (rows, columns))


HOSTILE = {
    "a dict that holds itself": (holding_itself, "holds itself"),
    "a list that holds itself": (list_of_itself, "holds itself"),
    "lists that hold lists twice": (lambda: each_twice(31), "more than 100,000 parts"),
    "lists 200 deep": (deep, "lists 32 deep"),
    "one element for ever": (lambda: repeating(10**6, 10**6), "1000000 x 1000000 entries"),
    "one element, five axes": (lambda: repeating(9, 9, 10**5, 10**5), "says the same bytes"),
    "one row for ever": (lambda: DENSE[0].expand(10**9, 12, 10), "says the same bytes"),
    "sparse, 4 TB": (
        lambda: sparse(2**21, 2**21, "coo"),
        "sparse tensor (torch.sparse_coo) of 2097152",
    ),
    "sparse, 4 EB": (lambda: sparse(2**31, 2**31, "coo"), "sparse tensor"),
    "sparse rows": (lambda: sparse(1000, 2**40, "csr"), "sparse tensor (torch.sparse_csr)"),
    "sparse columns": (lambda: sparse(2**40, 1000, "csc"), "sparse tensor (torch.sparse_csc)"),
    "two of one name": (
        lambda: {"a/mask": DENSE, "a": {"mask": ~DENSE}},
        "holds 'a/mask' twice",
    ),
    "a number and a text": (lambda: {0: DENSE, "0": ~DENSE}, "holds '0' twice"),
    "complex": (lambda: DENSE.to(torch.complex64), "complex64"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.quint8),
        "quint8",
    ),
    "on no device": (lambda: torch.zeros(3, 3, device="meta"), "can't be read as a mask"),
    "nothing": (dict, "holds no tensor"),
    "None": (lambda: None, "holds no tensor"),
    "an axis of 0": (lambda: torch.zeros(0, 5, dtype=torch.bool), "an axis of size 0"),
    "numbers too large": (
        lambda: {"mask": DENSE, "block_size": [2**70, 1]},
        "'block_size' is object",
    ),
    "scores": (lambda: torch.rand(3, 3), "expected bool, or only zeros and ones"),
    "NaN": (lambda: torch.full((3, 3), float("nan")), "holds nan"),
    "names that are none": (lambda: {"\x1b[31m" * 9000: torch.rand(2)}, "has rank 1"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning", "ignore:.*quantiz:UserWarning")
@pytest.mark.parametrize("case", HOSTILE)
def test_torch_files_that_hold_what_no_mask_is(tmp_path, case):
    make, told = HOSTILE[case]
    path = tmp_path / "m.pt"
    torch.save(make(), path)
    refused(path, told)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "int8",
                                   "int64", "float64"])  # fmt: skip
def test_zeros_and_ones_of_any_dtype_are_a_mask(tmp_path, dtype):
    torch.save(DENSE.to(getattr(torch, dtype)), tmp_path / "m.pt")
    assert load_mask(tmp_path / "m.pt", (128, 128)).mask.digest == MASK.digest


def test_heads_that_share_their_blocks_are_read(tmp_path):
    torch.save(DENSE[:1].expand(40, 12, 10), tmp_path / "m.pt")
    mask = load_mask(tmp_path / "m.pt", (128, 128)).mask
    assert mask.H == 40
    assert all((head.to_dense() == DENSE[0].numpy()).all() for head in mask.heads())


@pytest.mark.parametrize("shape", [(12, 10), (2, 12, 10)])
def test_block_sparse_tensors_without_a_block_are_empty_masks(tmp_path, shape):
    torch.save(torch.zeros(*shape).to_sparse_bsr((4, 5)), tmp_path / "m.pt")
    assert load_mask(tmp_path / "m.pt").mask.nnz == 0


def test_torch_files_are_held_against_their_checksums(tmp_path):
    """torch itself reads a flipped bit as another mask."""
    path = tmp_path / "m.pt"
    torch.save({"mask": DENSE}, path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        (data,) = [info for info in archive.infolist() if info.filename.endswith("data/0")]
    start = content.index(DENSE.numpy().tobytes(), data.header_offset)
    path.write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])
    assert not torch.equal(torch.load(path)["mask"], DENSE)
    refused(path, "data/0' is damaged")


def written(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(shape, end, dtype="BOOL"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


ONES = b"\x01" * 12
HEADERS = {
    "no JSON": (b"{", "is not JSON"), "no object": ([1], "no safetensors file"),
    "nested": (b"[" * 100_000, "nested too deeply"), "no text": (b"\xff" * 8, "is not JSON"),
    "digits": (b'{"m": ' + b"9" * 5000 + b"}", "is not JSON"),
    "two of one name": (
        b'{"mask": {"dtype":"BOOL","shape":[3,4],"data_offsets":[0,12]}, '
        b'"mask": {"dtype":"BOOL","shape":[4,3],"data_offsets":[0,12]}}', "says 'mask' twice",
    ),
    "too large": ({"mask": entry([3, 5], 12)}, "no safetensors file"),
    "far too large": ({"mask": entry([2**40, 2**40], 2**62)}, "no safetensors file"),
    "too small": ({"mask": entry([3, 3], 12)}, "no safetensors file"),
    "negative": ({"mask": entry([-3, -4], 12)}, "no safetensors file"),
    "bools": ({"mask": entry([True, 12], 12)}, "no safetensors file"),
    "backwards": ({"mask": {**entry([3, 4], 12), "data_offsets": [12, 0]}}, "no safetensors file"),
    "a dtype that is none": ({"mask": entry([3, 4], 12, "B1")}, "no safetensors file"),
    "float8": ({"mask": entry([3, 4], 12, "F8_E4M3")}, "'mask' is F8_E4M3, which can't be read"),
    "metadata that is a list": (
        {"__metadata__": [1], "mask": entry([3, 4], 12)},
        "no safetensors file",
    ),
    "metadata of numbers": (
        {"__metadata__": {"a": 1}, "mask": entry([3, 4], 12)},
        "no safetensors file",
    ),
    "nothing": ({}, "no safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_safetensors_headers_that_lie(tmp_path, case):
    header, told = HEADERS[case]
    path = tmp_path / "m.safetensors"
    written(path, header, ONES)
    refused(path, told)


@pytest.mark.parametrize("length", [0, 7, 10**7, 2**63 - 1, 2**64 - 1])
def test_safetensors_headers_of_another_length(tmp_path, length):
    written(tmp_path / "m.safetensors", {"mask": entry([3, 4], 12)}, ONES, length)
    refused(tmp_path / "m.safetensors", "safetensors file")


@pytest.mark.parametrize(("about", "told"), [
    ({"about": "{"}, "'about' in its metadata: is not JSON"),
    ({"about": "[1]"}, "is no JSON object"),
    ({"about": "[" * 100_000}, "nested too deeply"),
    ({"about": '{"a": 1, "a": 2}'}, "says 'a' twice"),
    ({"about": "9" * 5000}, "is not JSON"),
    ({"grid": "1x2"}, "its metadata: grid '1x2' can't be read"),
    ({"grid": "9" * 5000 + "x1x1"}, "its metadata: grid"),
    ({"grid": "\x1b[31m"}, "grid '\\x1b[31m'"),
    ({"grid": "4x4x4", "text_tokens": "x"}, "text_tokens is 'x' in its metadata"),
    ({"grid": "4x4x4", "text_tokens": "9" * 5000}, "text_tokens is '999"),
    ({"grid": "1x1x1"}, "tokens"),
])  # fmt: skip
def test_metadata_that_says_nothing(tmp_path, about, told):
    path = tmp_path / "qk.safetensors"
    q = torch.randn(1, 64, 8)
    safetensors.save_file({"q": q, "k": -q}, path, about)
    make = ["mask", "make", "--method", "exact", "--out", str(tmp_path / "m.npz")]
    for command in (make, ["diagnose"]):
        result = CliRunner().invoke(main, [*command, "--qk", str(path), "--quiet"])
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code == 2
        assert told in result.output or "its metadata can't be used" in result.output
        assert len(result.output) < 2200
    assert not (tmp_path / "m.npz").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    torch.save({"mask": DENSE, "block_size": [128, 128]}, folder / "zip.pt")
    torch.save({"mask": DENSE}, folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"mask": DENSE.to_sparse()}, folder / "sparse.pt")
    safetensors.save_file({"mask": DENSE}, folder / "m.safetensors")
    return folder


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_damaged_files_are_a_mask_or_an_error_that_names_them(whole, data):
    """Only the zip has checksums: damaged data elsewhere are another mask, like any other."""
    name = data.draw(st.sampled_from(sorted(p.name for p in whole.glob("[!_]*"))))
    content = bytearray((whole / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(content), 600) - 1))
        content[at] = data.draw(st.sampled_from([0, 1, 255, content[at] ^ 4, ord("]"), ord("9")]))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(1, len(content))) :]
    path = whole / f"_damaged{(whole / name).suffix}"
    path.write_bytes(content)
    try:
        mask = load_mask(path, (128, 128)).mask
    except InputError as problem:
        said = str(problem)
        assert said.startswith(f"{path}: ")
    else:
        assert mask.digest == MASK.digest or name in ("old.pt", "m.safetensors")
