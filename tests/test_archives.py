"""Zip and npy files that lie: the arrays come back as written, or one error names the file."""

from __future__ import annotations

import io
import itertools
import struct
import time
import zipfile
import zlib

import numpy as np
import pytest
from helpers import random_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from wavealign import archives
from wavealign.errors import InputError
from wavealign.masks import load_mask, save_mask
from wavealign.masks.export import export_mask
from wavealign.npz import NpzFile
from wavealign.order import Schedule, build_schedule

MASK = random_mask(shape=(3, 12, 10))
DENSE = np.stack([head.to_dense() for head in MASK.heads()])
METHODS = {
    "stored": zipfile.ZIP_STORED, "deflated": zipfile.ZIP_DEFLATED, "bz2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}  # fmt: skip


def npy(array=DENSE, **header):
    """An npy file whose header says what it is told to."""
    file = io.BytesIO()
    known = np.lib.format.header_data_from_array_1_0(array)
    text = repr({**known, **header}).encode()
    file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n")
    file.write(array.tobytes())
    return file.getvalue()


def written(path, members, method=zipfile.ZIP_STORED):
    """A zip of members: names and bytes, in this order."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def patched(path, name, offset, form, value):
    """The zip with a field of a member's entry in the directory changed."""
    content = bytearray(path.read_bytes())
    at = content.rindex(name.encode()) - 46
    struct.pack_into(form, content, at + offset, value)
    path.write_bytes(content)
    return path


def refused(path, *told):
    """The error of reading it, which names the file."""
    with pytest.raises(InputError) as problem:
        load_mask(path, (128, 128))
    said = str(problem.value)
    assert said.startswith(f"{path}: ")
    for text in told:
        assert text in said
    return said


def same_or_refused(path):
    try:
        assert load_mask(path, (128, 128)).mask.digest == MASK.digest
    except InputError:
        refused(path)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_whole_is_read(tmp_path, method):
    members = [("mask.npy", npy()), ("block_size.npy", npy(np.array([128, 128])))]
    path = written(tmp_path / "m.npz", members, METHODS[method])
    assert load_mask(path).mask.digest == MASK.digest
    fortran = npy(
        np.asarray(DENSE.transpose(2, 1, 0), order="C"), shape=DENSE.shape, fortran_order=True
    )
    written(tmp_path / "f.npz", [("mask.npy", fortran)], METHODS[method])
    assert load_mask(tmp_path / "f.npz", (128, 128)).mask.digest == MASK.digest


HEADERS = {
    "more heads than are there": {"shape": (4, 12, 10)},
    "fewer": {"shape": (2, 12, 10)},
    "far more": {"shape": (6_442_450_944,)},
    "more than a size can be": {"shape": (2**62, 2**62, 2**62)},
    "negative": {"shape": (-3, 12, 10)},
    "both negative": {"shape": (3, -12, -10)},
    "bools": {"shape": (True, True, 360)},
    "another dtype": {"descr": "<i8"},
    "a dtype of no bytes": {"descr": "|V0", "shape": (10**12,)},
    "no text": {"descr": "<U0", "shape": (10**12,)},
    "floats": {"shape": (3.0, 12, 10)},
    "text": {"shape": "3, 12, 10"},
    "a list": {"shape": [3, 12, 10]},
    "no dtype": {"descr": "nonsense"},
    "a dtype that is code": {"descr": "__import__('os')"},
    "an order that is none": {"fortran_order": 3},
    "one key more": {"more": 1},
    "too many axes": {"shape": (1,) * 70 + (360,)},
    "objects": {"descr": "|O"},
}


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie(tmp_path, case, suffix):
    path = tmp_path / f"m{suffix}"
    lying = npy(**HEADERS[case])
    written(path, [("mask.npy", lying)]) if suffix == ".npz" else path.write_bytes(lying)
    said = refused(path)
    assert "array '" in said
    if case == "objects":
        assert "pickled" in said
    elif "shape" in HEADERS[case] and type(HEADERS[case]["shape"]) is tuple and "text" not in said:
        assert "holds 360 bytes" in said or "shape is not valid" in said or "damaged" in said


@pytest.mark.parametrize("content", [
    b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x03\x00" + npy()[8:],
    b"\x93NUMPY\x09\x09" + npy()[8:],
    b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 70_000,
    b"\x93NUMPY\x01\x00\x40\x1f" + b"-" * 7999 + b"1", b"\x93NUMPY\x01\x00\x40\x1f" + b"[" * 8000,
    b"\x93NUMPY\x01\x00\x04\x00\xff\xfe\x00\x00", npy() + b"\x00", npy()[:-1], b"rubbish",
])  # fmt: skip
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_members_that_are_no_arrays(tmp_path, content, suffix):
    path = tmp_path / f"m{suffix}"
    written(path, [("mask.npy", content)]) if suffix == ".npz" else path.write_bytes(content)
    refused(path)


@pytest.mark.parametrize(("offset", "form", "value", "told"), [
    (8, "<H", 0x1, "is encrypted"), (8, "<H", 0x20, "is a patch"), (8, "<H", 0x41, "is encrypted"),
    (8, "<H", 0x2000, "is encrypted"), (10, "<H", 9, "compression method 9"),
    (10, "<H", 93, "method 93"),
    (10, "<H", 8, "damaged"), (10, "<H", 12, "damaged"), (10, "<H", 14, "damaged"),
    (16, "<I", 0, "damaged"), (20, "<I", 5, "declares"), (20, "<I", 2**31, "doesn't end"),
    (24, "<I", 2**32 - 2, "declares"), (24, "<I", 100, "damaged"),
    (42, "<I", 4, "member 'mask.npy'"),
    (42, "<I", 2**31, "damaged"),
])  # fmt: skip
def test_directories_that_lie(tmp_path, offset, form, value, told):
    members = [("block_size.npy", npy(np.array([128, 128]))), ("mask.npy", npy())]
    path = patched(written(tmp_path / "m.npz", members), "mask.npy", offset, form, value)
    refused(path, told)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_two_members_of_one_name(tmp_path):
    other = npy(~DENSE)
    path = written(tmp_path / "m.npz", [("mask.npy", npy()), ("mask.npy", other)])
    refused(path, "two members named 'mask.npy'")


def test_a_member_in_the_place_of_another(tmp_path):
    """The directory's entry of one array leads to another one's bytes."""
    members = [("a.npy", npy(DENSE)), ("b.npy", npy(~DENSE))]
    path = written(tmp_path / "m.npz", members)
    with zipfile.ZipFile(path) as archive:
        first = archive.getinfo("a.npy")
    for field, form, value in ((42, "<I", first.header_offset), (16, "<I", first.CRC)):
        patched(path, "b.npy", field, form, value)
    refused(path, "member '")


def test_bytes_that_no_entry_lists(tmp_path):
    members = [("mask.npy", npy()), ("seq_len.npy", npy(np.array([1500, 1200])))]
    path = written(tmp_path / "m.npz", members)
    content = path.read_bytes()
    end = content.rindex(b"PK\x05\x06")
    entry = content.index(b"PK\x01\x02")
    shorter = content.index(b"PK\x01\x02", entry + 4) - entry
    cut = bytearray(content)
    struct.pack_into("<HHI", cut, end + 8, 1, 1, shorter)  # entries, and bytes, of the directory
    path.write_bytes(cut)
    refused(path)


@pytest.mark.parametrize("method", METHODS)
def test_a_flipped_bit_anywhere_in_the_data_is_noticed(tmp_path, method):
    path = written(tmp_path / "m.npz", [("mask.npy", npy())], METHODS[method])
    content = path.read_bytes()
    directory = content.index(b"PK\x01\x02")
    for at in range(38, directory, 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        if method == "stored":
            refused(path)
        else:  # where streams end, some bits mean nothing
            same_or_refused(path)


def test_memory_is_looked_at_before_it_is_asked_for(tmp_path, monkeypatch):
    zeros = zipfile.ZipFile(tmp_path / "m.npz", "w", zipfile.ZIP_DEFLATED)
    size = 1 << 26
    with zeros, zeros.open("mask.npy", "w") as stream:
        stream.write(npy(np.zeros(0, bool), shape=(1 << 13, 1 << 13)))
        for _ in range(1 << 4):
            stream.write(bytes(size >> 4))
    monkeypatch.setattr("wavealign._memory._free_bytes", lambda: size - 1)
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("memory was asked for"))
    started = time.monotonic()
    refused(tmp_path / "m.npz", "64.0 MiB of memory, and 64.0 MiB are free", "[8192, 8192]")
    assert time.monotonic() - started < 1


def test_memory_that_runs_out_is_an_error_of_the_file(tmp_path, monkeypatch):
    path = written(tmp_path / "m.npz", [("mask.npy", npy())])

    def full(*_, **__):
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(np, "empty", full)
    refused(path, "needs more memory than there is")


@pytest.mark.parametrize("text", [
    np.array(b"\xff\xfe"), np.frombuffer(b"\xff" * 8, "<U2"), np.array(3), np.array(["a", "b"]),
    np.array("wavealign.mask/2"), np.array(b"\x1b[31m" * 9000), np.array("\udcff"),
], ids=range(7))  # fmt: skip
@pytest.mark.parametrize("name", ["schema", "meta"])
def test_texts_that_are_none(tmp_path, text, name):
    np.savez(tmp_path / "m.npz", mask=DENSE, block_size=[128, 128], **{name: text})
    path = tmp_path / "m.npz"
    with pytest.raises(InputError) as problem:
        load_mask(path)
    assert str(problem.value).startswith(f"{path}: ")
    assert len(str(problem.value)) < 1000


def test_no_files_and_no_paths(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "loop.npz").symlink_to("loop.npz")
    (tmp_path / "gone.npz").symlink_to("nowhere")
    for name, told in (
        ("pipe.npz", "is not a file"), ("loop.npz", "can't be read"), ("gone.npz", "no such file"),
        ("x" * 300 + ".npz", "can't be read (File name too long)"), ("a.npz/b.npz", "no such file"),
        ("x/" * 3000 + "m.npz", "can't be read (File name too long)"),
    ):  # fmt: skip
        with pytest.raises(InputError) as problem:
            load_mask(tmp_path / name)
        assert told in str(problem.value)
        assert len(str(problem.value)) < 1000


Q = np.random.default_rng(0).standard_normal((3, 16, 4), dtype=np.float32)


def mapped(path):
    pytest.importorskip("torch")
    from wavealign.qk.sources import FileSource

    with FileSource(path) as source:
        return source.heads, [tuple(x.numpy() for x in source.read(h)) for h in range(source.heads)]


def test_mapped_q_and_k_are_those_that_were_written(tmp_path):
    path = written(tmp_path / "qk.npz", [("q.npy", npy(Q)), ("k.npy", npy(-Q))])
    heads, pairs = mapped(path)
    assert heads == 3
    assert all((q == Q[h]).all() and (k == -Q[h]).all() for h, (q, k) in enumerate(pairs))
    with NpzFile(path) as file:
        assert isinstance(file.mapped_or_read("q"), np.memmap)


@pytest.mark.parametrize("header", [
    {"shape": (4, 16, 4)}, {"shape": (2, 16, 4)}, {"shape": (-3, 16, 4)}, {"shape": (True, 48, 4)},
    {"descr": "<f8"}, {"descr": "<f2"},
])  # fmt: skip
def test_mapped_headers_that_lie(tmp_path, header):
    """Where q says more than it has, k's bytes stand behind it."""
    path = written(tmp_path / "qk.npz", [("q.npy", npy(Q, **header)), ("k.npy", npy(Q, **header))])
    with pytest.raises(InputError, match=r"qk\.npz: array 'q' says"):
        mapped(path)


def test_mapped_arrays_are_held_against_their_checksum(tmp_path, monkeypatch):
    path = written(tmp_path / "qk.npz", [("q.npy", npy(Q)), ("k.npy", npy(-Q))])
    content = path.read_bytes()
    for at in itertools.chain(range(200, 900, 50), [len(content) // 2 - 100]):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(InputError, match=r"qk\.npz: (array|member) '"):
            mapped(path)
    path.write_bytes(content)
    mapped(path)
    read = []
    monkeypatch.setattr(zlib, "crc32", lambda *_: read.append(1) or 0)
    mapped(path)  # once a file is enough
    assert not read


@pytest.mark.parametrize("name", ["q.npy", "k.npy"])
def test_a_mapped_member_in_the_place_of_another(tmp_path, name):
    path = written(tmp_path / "qk.npz", [("q.npy", npy(Q)), ("k.npy", npy(-Q))])
    with zipfile.ZipFile(path) as archive:
        offsets = {i.filename: i.header_offset for i in archive.infolist()}
    other = next(offset for member, offset in offsets.items() if member != name)
    patched(path, name, 42, "<I", other)
    with pytest.raises(InputError, match=r"qk\.npz: member '"):
        mapped(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Files of every kind, and how they are read."""
    folder = tmp_path_factory.mktemp("whole")
    save_mask(folder / "packed.npz", MASK)
    export_mask(folder / "csr.npz", MASK, "csr")
    export_mask(folder / "flex.npz", MASK, "flex")
    np.savez(folder / "dense.npz", mask=DENSE, block_size=[128, 128])
    members = [("mask.npy", npy()), ("block_size.npy", npy(np.array([128, 128])))]
    written(folder / "lzma.npz", members, zipfile.ZIP_LZMA)
    build_schedule(MASK, "nnz", 8).save(folder / "schedule.npz")
    return folder


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_files_give_what_was_written_or_an_error_that_names_them(whole, data):
    name = data.draw(st.sampled_from(sorted(p.name for p in whole.glob("[!_]*.npz"))))
    content = bytearray((whole / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "set", "cut", "end", "more", "copy"])):
            case "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                content[at] = data.draw(st.sampled_from([0, 1, 255]))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 40))]
            case "end":
                del content[at:]
            case "more":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case "copy":
                start = data.draw(st.integers(0, len(content) - 1))
                content[at : at + 8] = content[start : start + 8]
        if not content:
            content = bytearray(b"P")
    path = whole / "_damaged.npz"
    path.write_bytes(content)
    if name != "schedule.npz":
        same_or_refused(path)
        return
    try:
        Schedule.fitting(path, MASK, None)
    except InputError as problem:
        said = str(problem)
        assert said.startswith(f"{path}: ")


def test_checking_members_reads_each_to_its_end(tmp_path):
    path = written(tmp_path / "a.zip", [("one", b"1" * 1000), ("two", b"2" * 1000)])
    content = bytearray(path.read_bytes())
    content[content.index(b"2222")] = ord("3")
    path.write_bytes(content)
    with path.open("rb") as stream, pytest.raises(InputError, match="member 'two' is damaged"):
        archives.check_members(archives.open_zip(stream))
