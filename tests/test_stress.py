"""The stress test in small, and that it finds what it is for. CONTRIBUTING.md has the large one."""

from unittest import mock

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
pytest.importorskip("diffusers")

import stress  # noqa: E402

from wavealign.attention import lanes, stateful  # noqa: E402
from wavealign.integrations import progress  # noqa: E402


@pytest.fixture(scope="module")
def parts():
    with stress.everything() as made:
        yield dict(made)


def test_every_output_is_right_or_an_error(parts):
    total = stress.run(parts.items(), calls=800)
    assert total.problems() == [], total.report()
    assert total.calls.total() >= 800
    assert min(total.count_injected(kind=kind) for kind in stress.KINDS) > 20
    assert total.right.total() > 400


def test_a_run_without_failures_is_a_problem(parts):
    total = stress.run(parts.items(), calls=8, share=0)
    assert total.bad == []
    assert total.problems() == [f"no {kind} failed" for kind in stress.KINDS]


LANE, PLACES = lanes.Lane(), progress.Progress()


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("call_sites", (lanes.Lanes, "here", lambda *_: LANE)),
        ("call_sites", (stateful.Attention, "_outdate", lambda *_: None)),
        ("call_enabled", (progress.ThreadProgress, "_here", lambda _: PLACES)),
    ],
    ids=["threads share lists", "lists of before", "threads share steps"],
)
def test_what_was_wrong_once_would_be_found(parts, part, broken):
    (function,) = (function for function in parts if function.__name__ == part)
    with mock.patch.object(*broken):
        assert stress.run([(function, 1)], calls=4000).bad
