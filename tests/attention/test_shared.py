"""State that calls share: threads, masks changed unseen, broken-off plans, captures, copies."""

import contextlib
import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import sys
import threading
import weakref

import pytest
from attention_cases import BLOCK, blocks, dense_attention, inputs
from faults import Fault, Interrupt

import wavealign
from wavealign.errors import InputError
from wavealign.masks import BlockMask

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from wavealign._devices import on_device  # noqa: E402
from wavealign.attention import call, lanes, plans, stateful  # noqa: E402
from wavealign.attention.plans import Buffers  # noqa: E402
from wavealign.gpu.registry import registered  # noqa: E402
from wavealign.planning import planner as planning  # noqa: E402
from wavealign.sessions import make_session  # noqa: E402
from wavealign.sessions import session as sessions  # noqa: E402


def site(policy="lockstep", **options):
    return wavealign.Attention("h200", policy=policy, backend="reference", block=BLOCK, **options)


def in_threads(count, work):
    """Run ``work(i)`` in threads that begin together; what any of them raised, is raised."""
    problems, start = [], threading.Barrier(count)

    def one(i):
        start.wait()
        try:
            work(i)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


@pytest.fixture
def cases():
    q, k, v = inputs(B=1)
    masks = [blocks(seed=seed, density=0.2 + 0.1 * seed) for seed in range(6)]
    return (q, k, v), masks, [dense_attention(q, k, v, mask)[0] for mask in masks]


class BrokenError(Exception):
    """Comes out of the planner where a test wants it to."""


def break_at(monkeypatch, name, breaks):
    """Let a part of the planner raise after its work, whenever ``breaks()`` says so."""
    real = getattr(planning, name)

    def part(*arguments):
        made = real(*arguments)
        if breaks():
            raise BrokenError(name)
        return made

    monkeypatch.setattr(planning, name, part)


def test_threads_objects_masks_and_errors(cases, monkeypatch):
    qkv, masks, wanted = cases
    counter = itertools.count(1)
    for name in ("write_lists", "write_places", "entry_skips"):
        break_at(monkeypatch, name, lambda: next(counter) % 7 == 0)
    buffers = Buffers()
    shared = [site(p, buffers=buffers) for p in ("lockstep", "nnz", "svd+nnz/shuffled+sawtooth")]
    own = [site(policy="auto") for _ in range(8)]
    broken = []

    def work(i):
        order = torch.randperm(30, generator=torch.Generator().manual_seed(i)).tolist()
        for step in order:
            m, chosen = step % len(masks), [*shared, own[i]][step % 4]
            for again in (False, True, True):
                try:
                    out = chosen(*qkv, masks[m], same_mask=again)
                except BrokenError:
                    broken.append(chosen)
                    continue
                torch.testing.assert_close(out, wanted[m])

    in_threads(8, work)
    assert len(broken) > 20
    for one in [*shared, *own]:
        told = one.statistics
        assert told.calls == told.planned + told.reused + broken.count(one)
    assert sum(one.statistics.calls for one in [*shared, *own]) == 8 * 30 * 3
    assert all(one.statistics.reused for one in own)


def test_counts_are_right_under_threads(cases):
    (q, k, v), masks, _ = cases
    one, before = site("nnz"), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(8, lambda i: [one(q, k, v, masks[0], same_mask=True) for _ in range(25)])
        told = one.statistics
        assert (told.calls, told.planned, told.reused) == (200, 8, 192)
        in_threads(8, lambda i: [one._count(skipped=1) for _ in range(5000)])
        assert told.skipped == 40_000
    finally:
        sys.setswitchinterval(before)


def test_ctrl_c_never_leaves_the_lock_behind():
    one, free = site("nnz"), []

    def find():
        if stateful._counting.lock.acquire(timeout=5):
            stateful._counting.lock.release()
            free.append(True)

    for at in itertools.count(1):
        with contextlib.suppress(Interrupt), Fault("line", at) as fault:
            one._count(skipped=1)
        other = threading.Thread(target=find)
        other.start()
        other.join()
        assert len(free) == at
        if not fault.failed:
            break
    assert at > 3
    assert one.statistics.skipped >= 1


def test_nothing_is_left_of_threads_that_ended(cases):
    (q, k, v), masks, _ = cases
    one, kept = site("nnz"), []

    def work(_):
        one(q, k, v, masks[0])
        kept.extend(weakref.ref(planner) for planner in one._buffers._lanes.here(q.device).values())
        assert one.explain()

    in_threads(3, work)
    gc.collect()
    assert len(kept) == 3
    assert [planner() for planner in kept] == [None] * 3
    assert one._lanes.values() == one._buffers._lanes.values() == []


def test_streams_have_lists_of_their_own(monkeypatch):
    found = lanes.Lanes()
    device = torch.device("cuda", 0)
    stream = type("Stream", (), {"cuda_stream": 7})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    first = found.here(device)
    assert found.here(device) is first
    stream.cuda_stream = 8
    assert found.here(device) is not first
    assert found.here(torch.device("cpu")) is not first
    del first
    for stream.cuda_stream in range(100):
        found.here(device)["a"] = 1
    assert len(found.values()) == 16


@pytest.mark.parametrize(
    "change",
    [
        lambda mask, other: mask.numpy().__setitem__(..., other.numpy()),
        lambda mask, other: mask.data.copy_(other),
        lambda mask, other: torch.from_dlpack(mask.view(torch.uint8)).copy_(other),
        lambda mask, other: mask.copy_(other),
    ],
    ids=["numpy", "data", "dlpack", "seen"],
)
@pytest.mark.parametrize("policy", ["auto", "nnz"])
def test_lists_follow_what_the_mask_holds(cases, policy, change):
    qkv, masks, wanted = cases
    one, mask = site(policy), masks[0].clone()
    torch.testing.assert_close(one(*qkv, mask), wanted[0])
    change(mask, masks[1])
    torch.testing.assert_close(one(*qkv, mask), wanted[1])
    torch.testing.assert_close(one(*qkv, mask, same_mask=True), wanted[1])
    assert one.statistics.reused == 1


def test_same_mask_is_no_blank_cheque(cases):
    qkv, masks, wanted = cases
    one = site()
    for m in (0, 1, 0):  # another tensor than the last call's is planned, whatever is said
        torch.testing.assert_close(one(*qkv, masks[m], same_mask=True), wanted[m])
    masks[0].copy_(masks[2])  # torch counts this
    torch.testing.assert_close(one(*qkv, masks[0], same_mask=True), wanted[2])
    assert one.statistics.reused == 0
    shared = [site("nnz", buffers=one._buffers) for _ in range(2)]
    for other, m in zip(shared * 2, (3, 4, 3, 4), strict=True):  # lists were another's since
        torch.testing.assert_close(other(*qkv, masks[m], same_mask=True), wanted[m])


def test_lists_of_before_a_call_that_failed_are_not_those_of_its_mask(cases):
    (q, k, v), masks, wanted = cases
    one, mask = site(), masks[0].clone()
    one(q, k, v, mask)
    mask.numpy()[...] = masks[1].numpy()
    with pytest.raises(InputError, match="q is"):
        one(q[0], k, v, mask)
    torch.testing.assert_close(one(q, k, v, mask, same_mask=True), wanted[1])
    mask.numpy()[...] = masks[2].numpy()
    in_threads(1, lambda _: one(q, k, v, mask))
    torch.testing.assert_close(one(q, k, v, mask, same_mask=True), wanted[2])


@pytest.mark.parametrize("part", ["dense_mask", "write_places", "entry_skips", "write_lists"])
@pytest.mark.parametrize("problem", [BrokenError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_plan_that_breaks_off_passes_for_nobodys(cases, monkeypatch, part, problem):
    qkv, masks, wanted = cases
    one = site()
    one(*qkv, masks[0])
    with monkeypatch.context() as patch:
        real = getattr(planning, part)

        def broken(*arguments):
            real(*arguments)
            raise problem

        patch.setattr(planning, part, broken)
        with pytest.raises(problem):
            one(*qkv, masks[1])
        patch.setattr(lanes, "capturing", lambda _: True)
        with pytest.raises(InputError, match="a call like this one beforehand"):
            one(*qkv, masks[1])  # that call never came to its policies
    torch.testing.assert_close(one(*qkv, masks[0], same_mask=True), wanted[0])
    torch.testing.assert_close(one(*qkv, masks[1], same_mask=True), wanted[1])


def test_captures_plan_or_are_refused(cases, monkeypatch):
    (q, k, v), masks, wanted = cases
    one = site("auto")
    ahead = {"device_profile": "h200", "backend": "reference", "block": BLOCK}
    planned = wavealign.plan(masks[0], "nnz", tokens=(75, 61), head_dim=16, **ahead)
    for module in (lanes, call, sessions):
        monkeypatch.setattr(module, "capturing", lambda _: True)
    with pytest.raises(InputError, match=r"captured.*beforehand.*attend\(q, k, v, plan="):
        one(q, k, v, masks[0])
    with pytest.raises(InputError, match="a plan made beforehand"):
        wavealign.attend(q, k, v, masks[0], **ahead)
    torch.testing.assert_close(wavealign.attend(q, k, v, plan=planned), wanted[0])
    run = make_session("gsrs", profile="h200", backend="reference")
    with pytest.raises(InputError, match="a session counts steps on the host"):
        run.attend(0, 0, *(t.transpose(1, 2) for t in (q, k, v)))
    monkeypatch.setattr(lanes, "capturing", lambda _: False)
    one(q, k, v, masks[0])
    monkeypatch.setattr(lanes, "capturing", lambda _: True)
    # The decision is there; planning is recorded, whatever is said of the mask.
    torch.testing.assert_close(one(q, k, v, masks[0], same_mask=True), wanted[0])
    assert (one.statistics.decided, one.statistics.planned, one.statistics.reused) == (1, 2, 0)
    with pytest.raises(InputError, match="a mask tensor on the device"):
        one(q, k, v, BlockMask.from_dense(masks[0].numpy(), BLOCK, (75, 61)))
    monkeypatch.setattr(lanes, "capturing", lambda _: False)
    for _ in range(2):  # a replay may have written other lists since
        torch.testing.assert_close(one(q, k, v, masks[0], same_mask=True), wanted[0])
    assert one.statistics.reused == 0
    assert one._buffers.captured == set(one._buffers._lanes.values())


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_have_the_terms_and_no_past(cases, copied):
    qkv, masks, wanted = cases
    one = site("auto", reuse=wavealign.Reuse(calls=3))
    one(*qkv, masks[0])
    other = copied(one)
    assert other._lanes.values() == []
    assert (other.statistics.calls, other.explain()) == (0, "")
    assert (other._terms, other._reuse, other._block) == (one._terms, one._reuse, one._block)
    torch.testing.assert_close(other(*qkv, masks[1], same_mask=True), wanted[1])
    torch.testing.assert_close(one(*qkv, masks[0], same_mask=True), wanted[0])
    assert (one.statistics.calls, other.statistics.calls) == (2, 1)


def test_copies_of_sites_go_on_sharing_lists():
    buffers = Buffers()
    copies = copy.deepcopy([site(buffers=buffers), site(buffers=buffers)])
    assert copies[0]._buffers is copies[1]._buffers
    assert copies[0]._buffers is not buffers


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_attends(cases):
    qkv, masks, wanted = cases
    one = site()
    one(*qkv, masks[0])

    def child():
        for m in (0, 1):
            torch.testing.assert_close(one(*qkv, masks[m], same_mask=True), wanted[m])

    with stateful._counting.lock:  # as another thread may at the time
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.gpu
def test_streams_and_a_graph_on_a_gpu():
    q, k, v = (x.cuda() for x in inputs(B=1, tokens=(1024, 1024), D=128, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    masks = [(torch.rand(4, 8, 8, generator=generator) < 0.5).cuda() for _ in range(6)]
    for mask in masks:
        mask[..., 0] = True

    def site():
        return wavealign.Attention(policy="lockstep", backend="triton")

    wanted = [site()(q, k, v, mask) for mask in masks]
    torch.cuda.synchronize()
    shared, streams = site(), [torch.cuda.Stream() for _ in masks]
    for _ in range(20):
        outs = []
        for stream, mask in zip(streams, masks, strict=True):
            with torch.cuda.stream(stream):
                outs.append(shared(q, k, v, mask))
        torch.cuda.synchronize()
        for out, expected in zip(outs, wanted, strict=True):
            torch.testing.assert_close(out, expected)
    mask, graph = masks[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask.logical_or_(mask)  # torch warns of an empty graph
        with pytest.raises(InputError, match="on the capture's stream"):
            site()(q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0]):
        out = shared(q, k, v, mask)
    for m in (1, 0, 2):
        mask.copy_(masks[m])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, wanted[m])


def test_kernels_are_launched_on_the_gpu_of_q(cases, monkeypatch):
    (q, k, v), masks, _ = cases
    asked = []
    for module in (stateful, call, plans):
        monkeypatch.setattr(module, "on_device", lambda t: asked.append(t) or on_device(t))
    site()(q, k, v, masks[0])
    ahead = {"device_profile": "h200", "backend": "reference", "block": BLOCK}
    wavealign.attend(q, k, v, masks[0], **ahead)
    wavealign.plan(masks[0], tokens=(75, 61), **ahead)
    shapes = [where.shape for where in asked if isinstance(where, torch.Tensor)]
    assert shapes == [q.transpose(1, 2).shape] * 2 + [masks[0].shape]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa4", "triton", "flex", "cudnn"])
def test_threads_may_compile_at_once_on_a_gpu(backend):
    if reason := registered(backend).missing():
        pytest.skip(reason)
    q, k, v = (x.cuda() for x in inputs(B=1, tokens=(1024, 1024), D=128, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    masks = [(torch.rand(4, 8, 8, generator=generator) < 0.5).cuda() for _ in range(8)]
    for mask in masks:
        mask[..., 0] = True
    ahead = {"backend": "reference", "policy": "original", "device_profile": "h200"}
    wanted = [wavealign.attend(q, k, v, mask, block=(128, 128), **ahead) for mask in masks]
    torch.cuda.synchronize()
    shared = wavealign.Attention(policy="lockstep", backend=backend, block=(128, 128))

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for m in (i, (i + 1) % 8) * 5:
                torch.testing.assert_close(
                    shared(q, k, v, masks[m]), wanted[m], rtol=0.02, atol=0.02
                )

    in_threads(8, work)
