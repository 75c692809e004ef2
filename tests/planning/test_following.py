"""Lists follow a mask's content: against a planner that plans every time."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from wavealign.planning import Planner  # noqa: E402
from wavealign.planning import planner as planner_module  # noqa: E402
from wavealign.planning.conditional import Conditional, missing  # noqa: E402

SHAPE, WAVE = (2, 9, 13), 3
POLICIES = ["original", "nnz-wave", "lockstep", ["resync", "nnz/shuffled+sawtooth"], "svd+nnz"]
ROADS = ["new tensor", "in place", "behind the version counter", "the same again"]


def random_masks(count, device="cpu", shape=SHAPE):
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(shape, generator=generator) < 0.4).to(device) for _ in range(count)]


def rows(schedule):
    """What a kernel reads: what lies behind a row's list doesn't count."""
    places = torch.arange(schedule.indices.shape[-1], device=schedule.indices.device)
    inside = places < schedule.counts[..., None]
    return schedule.table, schedule.counts, schedule.indices.where(inside, -1)


def assert_same(found, expected):
    for a, b in zip(rows(found), rows(expected), strict=True):
        assert torch.equal(a, b)
    assert found.policies == expected.policies


def moved(mask, held, road):
    """A mask's content, brought to where `follow` reads it."""
    if road == "new tensor" or held is None:
        return mask.clone()
    if road == "in place":
        held.copy_(mask)
    elif road == "behind the version counter":
        held.data.copy_(mask)
    return held


calls = st.tuples(
    st.integers(0, 2), st.sampled_from(range(len(POLICIES))), st.sampled_from(ROADS),
    st.sampled_from(["follow", "follow", "follow", "plan", "broken off"]),
)  # fmt: skip


def follow_through(steps, device):
    masks = random_masks(3, device)
    planner, oracle = (Planner(SHAPE, device, wave=WAVE) for _ in range(2))
    held, write = None, planner_module.write_lists
    for m, policy, road, how in steps:
        held = moved(masks[m], held, road)
        if how == "broken off":
            planner_module.write_lists = broken
            try:
                planner.follow(held, POLICIES[policy])
            except MemoryError:
                pass
            finally:
                planner_module.write_lists = write
            continue
        made = planner(held, POLICIES[policy]) if how == "plan" else None
        assert_same(made or planner.follow(held, POLICIES[policy]), oracle(held, POLICIES[policy]))


def broken(*_):
    raise MemoryError


@settings(max_examples=100, deadline=None)
@given(st.lists(calls, min_size=1, max_size=12))
def test_lists_are_those_of_a_planner_that_plans_every_time(steps):
    follow_through(steps, "cpu")


def test_what_stands_already_is_not_made_again(monkeypatch):
    made = []
    write = planner_module.write_lists
    monkeypatch.setattr(planner_module, "write_lists", lambda *a: made.append(0) or write(*a))
    planner, (first, second) = Planner(SHAPE, "cpu", wave=WAVE), random_masks(2)
    for mask, policy in [(first, "nnz"), (first.clone(), "nnz"), (second, "nnz"), (second, "nnz")]:
        planner.follow(mask, policy)
    assert len(made) == 2
    planner.follow(second, "original")
    planner.follow(second, "nnz")
    assert len(made) == 4  # one set of buffers: by other policies they are other lists


def test_why_there_is_no_conditional_work_is_said():
    assert missing(torch.device("cpu")) == "cpu is no CUDA device"


gpu = pytest.mark.gpu


@gpu
@settings(max_examples=30, deadline=None)
@given(st.lists(calls, min_size=1, max_size=25))
def test_the_device_follows_by_itself(steps):
    follow_through(steps, "cuda")


@gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replayed_graph_may_write_the_mask(policy):
    masks, source = random_masks(3, "cuda"), torch.empty(SHAPE, dtype=torch.bool, device="cuda")
    held = torch.empty_like(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.copy_(source)
    planner, oracle = (Planner(SHAPE, "cuda", wave=WAVE) for _ in range(2))
    for m in (0, 0, 1, 2, 2, 0):
        source.copy_(masks[m])
        graph.replay()
        assert_same(planner.follow(held, policy), oracle(masks[m], policy))


@gpu
def test_a_device_that_finds_no_change_leaves_the_lists_alone():
    planner, (mask,) = Planner(SHAPE, "cuda", wave=WAVE), random_masks(1, "cuda")
    for _ in range(3):
        schedule = planner.follow(mask, "nnz")
    schedule.indices.fill_(-7)  # nobody does: it shows who writes
    assert (planner.follow(mask.clone(), "nnz").indices == -7).all()
    oracle = Planner(SHAPE, "cuda", wave=WAVE)
    for _ in range(2):
        mask.data[0, 0, :2].logical_not_()
        assert_same(planner.follow(mask, "nnz"), oracle(mask, "nnz"))


@gpu
def test_memory_does_not_grow():
    shape = (4, 300, 300)
    planner, masks = Planner(shape, "cuda", wave=132), random_masks(2, "cuda", shape)
    used = []
    for step in range(40):
        for policy in (*POLICIES[:3], "svd+nnz", "resync", "nnz"):  # more than are remembered
            planner.follow(masks[step % 2], policy)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[3]


@gpu
def test_other_threads_draw_and_allocate_while_one_captures():
    """Torch's own capture would make the generator refuse them."""
    stop, wrong = threading.Event(), []

    def others():
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                while not stop.is_set():
                    torch.randn(1000, device="cuda")
                    torch.empty(1 << 22, device="cuda").record_stream(torch.cuda.current_stream())
            except RuntimeError as error:
                wrong.append(error)

    threads = [threading.Thread(target=others) for _ in range(3)]
    for thread in threads:
        thread.start()
    (mask,) = random_masks(1, "cuda", (4, 300, 300))
    oracle = Planner(mask.shape, "cuda", wave=132)
    for _ in range(20):
        planner = Planner(mask.shape, "cuda", wave=132)
        for _ in range(3):
            assert_same(planner.follow(mask, "svd+nnz"), oracle(mask, "svd+nnz"))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
def test_work_that_fails_while_it_is_captured_leaves_nothing_behind(monkeypatch):
    planner, (mask, other) = Planner(SHAPE, "cuda", wave=WAVE), random_masks(2, "cuda")
    oracle = Planner(SHAPE, "cuda", wave=WAVE)
    planner.follow(mask, "nnz")
    with monkeypatch.context() as patched:
        patched.setattr(planner_module, "write_lists", broken)
        with pytest.raises(MemoryError):
            planner.follow(other, "nnz")
    for m in (other, mask, mask):
        assert_same(planner.follow(m, "nnz"), oracle(m, "nnz"))


@gpu
def test_where_nothing_can_be_captured_every_call_plans(monkeypatch):
    def refused(*_):
        raise RuntimeError("CUDA answered CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    monkeypatch.setattr(Conditional, "_captured", refused)
    planner, oracle = (Planner(SHAPE, "cuda", wave=WAVE) for _ in range(2))
    masks = random_masks(2, "cuda")
    planner.follow(masks[0], "nnz")
    with pytest.warns(RuntimeWarning, match="every call plans"):
        planner.follow(masks[1], "nnz")
    for m in (1, 0, 0):
        masks[m].logical_not_()
        assert_same(planner.follow(masks[m], "nnz"), oracle(masks[m], "nnz"))
