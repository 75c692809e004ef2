"""Runs, steps and branches, told from the calls of a transformer alone."""

import threading

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from wavealign.errors import InputError  # noqa: E402
from wavealign.integrations import progress  # noqa: E402
from wavealign.integrations.progress import Progress  # noqa: E402

A, U, B = (torch.full((1, 2), float(i)) for i in range(3))
BF16 = torch.bfloat16


class Model(torch.nn.Module):
    """A transformer that does nothing, or is broken off."""

    broken = False

    def forward(self, hidden_states, timestep=None, encoder_hidden_states=None):
        if self.broken:
            raise KeyboardInterrupt
        return hidden_states


def places(calls, dtype=torch.float32, **options):
    """Run, step and branch of calls: timestep, text, and a number that stands for the latents."""
    model, progress, found = Model(), Progress(**options), []
    progress.watch(model)
    for time, text, latents in calls:
        model(torch.tensor([latents]), torch.tensor([time]).to(dtype), text.clone())
        place = progress.place
        found.append((place.run, place.step, place.branch))
    progress.close()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, BF16])
def test_guidance_and_two_runs(dtype):
    run = [(t, text, i) for i, t in enumerate((900, 800, 700)) for text in (A, U)]
    wanted = [(0, s, b) for s in range(3) for b in range(2)]
    again = [(1, s, b) for _, s, b in wanted]
    assert places(run + run, dtype) == wanted + again
    # In another order at a later step, or with the unconditional branch left out.
    assert places([*run[:2], run[3], run[2], run[4]], dtype) == [*wanted[:2], (0, 1, 1), (0, 1, 0),
                                                                 (0, 2, 0)]  # fmt: skip


def test_a_warm_up_of_one_step_with_the_same_negative_text():
    """The first call seems another branch of the warm-up; the second says where it belongs."""
    calls = [(900, B, 1), (900, U, 1), (900, A, -2), (900, U, -2), (800, A, -3), (800, U, -3)]
    found = places(calls)
    assert found[2:] == [(0, 0, 2), (1, 0, 1), (1, 1, 0), (1, 1, 1)]


def test_perturbed_guidance_has_one_text_twice():
    run = [(t, text, i) for i, t in enumerate((900, 800)) for text in (A, U, A)]
    assert places(run) == [(0, s, b) for s in range(2) for b in range(3)]
    assert places(run, BF16) == places(run)


def test_steps_of_one_rounded_timestep():
    times = (1000.0, 996.0, 996.0, 996.0, 992.0)
    for texts in ((A,), (A, U)):
        run = [(t, text, i) for i, t in enumerate(times) for text in texts]
        wanted = [(0, s, b) for s in range(5) for b in range(len(texts))]
        assert places(run, BF16) == wanted
        # A first step that comes again may be another run.
        merged = [(t + 4 * (t == 996), text, i) for t, text, i in run]
        assert places(merged, BF16, announced=True) == wanted
        with pytest.raises(InputError, match="again with the same text: the second step"):
            places(merged, BF16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_run_broken_off_after_its_first_step(dtype):
    run = [(t, text, t) for t in (900, 800) for text in (A, U)]
    for before in ([(900, A, 5)], [(900, A, 5), (900, U, 5)]):
        found = places(before + run, dtype)[len(before) :]
        assert found == [(1, s, b) for s in range(2) for b in range(2)]


def test_a_call_broken_off_is_made_again():
    model, progress = Model(), Progress()
    progress.watch(model)

    def call(time, text, broken=False):
        model.broken = broken
        arguments = (torch.ones(1), torch.tensor([time]), text)
        if broken:
            with pytest.raises(KeyboardInterrupt):
                model(*arguments)
        else:
            model(*arguments)
        return progress.place.run, progress.place.step, progress.place.branch

    assert call(900, A, broken=True) == (0, 0, 0)
    assert call(900, B) == (1, 0, 0)
    assert call(900, U) == (1, 0, 1)
    assert call(800, B, broken=True) == (1, 1, 0)
    assert not progress.interrupted
    assert call(800, B) == (1, 1, 0)
    assert progress.interrupted
    assert call(800, U) == (1, 1, 1)
    assert not progress.interrupted


def broken(progress, model, *call):
    """A call that ends in Ctrl-C."""
    model.broken = True
    with pytest.raises(KeyboardInterrupt):
        model(*call)
    model.broken = False


def test_another_run_begins_after_a_call_of_a_first_step_was_broken_off():
    model, progress, latents = Model(), Progress(), torch.ones(1)
    progress.watch(model)
    for _ in range(2):
        model(latents, torch.tensor([900.0]), A)
        broken(progress, model, latents, torch.tensor([900.0]), U)
    model(latents, torch.tensor([900.0]), U)  # that call again
    assert (progress.place.run, progress.place.branch) == (1, 1)
    broken(progress, model, latents, torch.tensor([900.0]), U.clone())
    model(latents, torch.tensor([950.0]), A)
    assert (progress.place.run, progress.place.step, progress.place.branch) == (2, 0, 0)


def test_a_call_that_is_refused_may_be_made_again():
    model, progress, latents, refuses = Model(), Progress(), torch.ones(1), []

    def began(*_):
        if refuses:
            raise refuses.pop()

    progress.watch(model, began)
    model(latents, torch.tensor([900.0]), A)
    for problem in (InputError("as it happens"), KeyboardInterrupt()):
        refuses.append(problem)
        before = vars(progress).copy()
        with pytest.raises(type(problem)):
            model(latents, torch.tensor([800.0]), A)
        assert vars(progress) == before
    with pytest.raises(InputError, match="timestep 950 after 900"):
        model(latents, torch.tensor([950.0]), A)
    model(latents, torch.tensor([800.0]), A)
    assert (progress.place.step, progress.interrupted) == (1, False)


def elsewhere(function, *arguments):
    """In a thread that lives on until the test has ended; what it raised, if anything."""
    found, told = [], threading.Event()

    def work():
        try:
            function(*arguments)
            found.append(None)
        except InputError as problem:
            found.append(str(problem))
        told.set()
        threading.Event().wait(0.2)

    threading.Thread(target=work).start()
    told.wait()
    return found[0]


def test_the_calls_of_a_run_come_from_one_thread():
    model, progress = Model(), Progress(steps=3)
    progress.watch(model)

    def call(time, latents):
        model(torch.tensor([latents]), torch.tensor([time]), A)

    call(900.0, 1)
    assert "another thread has begun one" in elsewhere(call, 700.0, 2)
    call(700.0, 1)
    assert elsewhere(call, 900.0, 2) is None  # a run of its own
    # Its latents may tell it, too: they go on with those of the run before.
    with pytest.raises(InputError, match=r"timestep 500 (in the middle of|goes on with the run)"):
        call(500.0, 1)
    elsewhere(progress.restart)
    with pytest.raises(InputError, match="timestep 500 in the middle of a run, and another thread"):
        call(500.0, 1)  # not the first call of a run
    call(900.0, 1)
    assert (progress.place.run, progress.place.step) == (2, 0)
    for time in (700.0, 500.0):
        call(time, 1)
    assert elsewhere(call, 900.0, 2) is None
    progress.restart()
    call(500.0, 3)  # the last run here was over
    assert progress.place.step == 0


def test_a_call_in_whose_time_another_run_begins_has_no_place():
    model, progress = Model(), Progress()
    progress.watch(model)
    model(torch.ones(1), torch.tensor([900.0]), A)
    assert progress.placed() == progress.place
    assert "another run has begun" in elsewhere(progress.placed)
    progress.restart()
    with pytest.raises(InputError, match="outside its transformer, or another run has begun"):
        progress.placed()


@pytest.mark.parametrize(
    ("calls", "steps", "message"),
    [
        ([(100, A, 0), (200, A, 1)], None, "timestep 200 after 100.*expected timesteps that fall"),
        ([(900, A, 0), (700, A, 1), (800, A, 2)], 9, "timestep 800 after 700"),
        ([(900, A, 0), (800, A, 1), (800, A, 1)], None, "call 2 of the transformer.*step 1"),
        ([(900, A, 0)] * 5, None, "call 5 of the transformer at timestep 900, step 0"),
        ([(900, A, 0), (800, A, 1), (700, A, 2)], 2, "step 2 of a run of 2 steps"),
    ],
)
def test_what_cannot_be_known_is_refused(calls, steps, message):
    assert len(places(calls[:-1], steps=steps)) == len(calls) - 1
    with pytest.raises(InputError, match=message):
        places(calls, steps=steps)


def scheduled(scheduler, steps, dtype, texts):
    """A run's calls by a scheduler of diffusers, with latents that it has moved."""
    draw = torch.Generator().manual_seed(0)
    scheduler.set_timesteps(steps)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)  # as pipelines do; it can't find one that comes twice
    latents, calls = torch.randn(1, 4, 3, 4, 4, generator=draw), []
    for timestep in scheduler.timesteps:
        given = timestep.expand(1).to(dtype or timestep.dtype)
        calls += [(given, text, latents.clone()) for text in texts]
        velocity = torch.randn(latents.shape, generator=draw) - 0.3 * latents
        latents = scheduler.step(velocity, timestep, latents).prev_sample
    return calls


def called(calls, **options):
    """Run, step and branch of calls, up to one that is refused."""
    model, progress, found = Model(), Progress(**options), []
    progress.watch(model)
    for timestep, text, latents in calls:
        try:
            model(latents, timestep, text)
        except InputError:
            break
        place = progress.place
        found.append((place.run, place.step, place.branch))
    return found


SCHEDULERS = {  # flow at a shift where timesteps come twice as whole numbers or in 16 bits
    "unipc": ("UniPCMultistepScheduler", 100, {"flow_shift": 12.0}),
    "dpm++": ("DPMSolverMultistepScheduler", 60, {"flow_shift": 30.0}),
    "euler": ("FlowMatchEulerDiscreteScheduler", 60, {"shift": 30.0}),
    "ddim": ("DDIMScheduler", 20, {}),
}

TWICE = {  # of which dtype
    "unipc": lambda dtype: True,
    "dpm++": lambda dtype: True,
    "euler": lambda dtype: dtype == BF16,
    "ddim": lambda dtype: False,
}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("texts", [(A,), (A, U), (U, A)])
@pytest.mark.parametrize("dtype", [None, BF16, torch.float16])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_steps_of_a_scheduler(name, dtype, texts):
    diffusers = pytest.importorskip("diffusers")
    kind, steps, options = SCHEDULERS[name]
    if "flow_shift" in options:
        options = {**options, "prediction_type": "flow_prediction", "use_flow_sigmas": True}
    calls = scheduled(getattr(diffusers, kind)(**options), steps, dtype, texts)
    times = [float(timestep) for timestep, _, _ in calls[:: len(texts)]]
    assert (len(set(times)) < steps) == TWICE[name](dtype)
    wanted = [(0, s, b) for s in range(steps) for b in range(len(texts))]
    assert called(calls) == called(calls, announced=True) == wanted


def test_timesteps_made_float_are_refused_where_they_come_twice():
    diffusers = pytest.importorskip("diffusers")
    for kind, options in (
        ("UniPCMultistepScheduler", {"flow_shift": 12.0, "use_flow_sigmas": True}),
        ("FlowMatchHeunDiscreteScheduler", {"shift": 7.0}),
    ):
        flow = {"prediction_type": "flow_prediction"} if "flow_shift" in options else {}
        calls = scheduled(getattr(diffusers, kind)(**flow, **options), 100, torch.float32, (A, U))
        found = called(calls)
        repeated = next(
            i for i in range(2, len(calls), 2) if float(calls[i][0]) == float(calls[i - 2][0])
        )
        assert found == [(0, s, b) for s in range(repeated // 2) for b in (0, 1)]


@pytest.mark.parametrize(
    ("dtype", "texts"), [(torch.int64, (A, U)), (BF16, (A, U)), (BF16, (A,)), (BF16, (A, U, B))]
)
def test_latents_that_stay_say_nothing_of_a_first_step_that_comes_again(dtype, texts):
    run = [(999, text, 5) for _ in range(2) for text in texts]
    with pytest.raises(InputError, match="again with the same text"):
        places(run, dtype)
    if len(texts) == 1:
        assert places(run, dtype, announced=True) == [(0, 0, 0), (0, 1, 0)]


def test_whole_timesteps_of_a_run_from_one_clip_are_refused():
    """Noise of two runs that begin late is nearer than that of two that begin at the top."""
    clip, first, second = torch.randn(3, 1, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for share, found in ((0.2, [(0, 0, 0)]), (0.9, [(0, 0, 0), (1, 0, 0)])):
        latents = [(1 - share) * clip + share * noise for noise in (first, second)]
        assert called([(torch.tensor([200]), A, x) for x in latents]) == found


def test_a_first_call_is_one_threads_too(monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    model, watched = Model(), Progress()
    watched.watch(model)

    def slow(*values):
        inside.set()
        go_on.wait(10)
        return ""

    def call():
        model(torch.ones(1), torch.tensor([9]), A)

    with monkeypatch.context() as patch:
        patch.setattr(progress, "digest_text", slow)
        found = []
        thread = threading.Thread(target=lambda: found.append(elsewhere(call)))
        thread.start()
        inside.wait(10)
        with pytest.raises(InputError, match="another thread's call"):
            call()
        watched.restart()  # says that it was broken off
        go_on.set()
        thread.join()
    assert "was said to be broken off, and went on" in found[0]
    assert watched.place is None  # it has moved nothing
    call()
    assert (watched.place.run, watched.place.step, watched.place.branch) == (0, 0, 0)


def test_texts_in_lists_are_read_whole():
    long = torch.zeros(1, 5000)
    other = long.clone()
    other[0, 2500] = 1  # not among what a tensor prints
    model, progress, found = Model(), Progress(), []
    progress.watch(model)
    for text in (long, other):
        model([torch.ones(1)], torch.tensor([9]), [text])
        found.append(progress.place.branch)
    assert found == [0, 1]


def test_a_run_may_begin_lower_once_the_last_is_over():
    run = [(900, A, 0), (700, A, 1), (800, A, 2)]
    assert places(run, steps=2)[-1] == (1, 0, 0)
    with pytest.raises(InputError, match="without a timestep"):
        Progress().begin({})


@pytest.mark.parametrize("ahead", [0, 1])
def test_two_runs_of_one_text_that_take_turns_are_refused(ahead):
    """As generators or coroutines in one thread would."""
    diffusers = pytest.importorskip("diffusers")
    draw = torch.Generator().manual_seed(5)
    runs = []
    for _ in range(2):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0)
        scheduler.set_timesteps(8)
        latents, calls = torch.randn(1, 4, 3, 4, 4, generator=draw), []
        for timestep in scheduler.timesteps:
            calls += [(timestep[None], text, latents) for text in (A, U)]
            velocity = torch.randn(latents.shape, generator=draw)
            latents = scheduler.step(velocity, timestep, latents).prev_sample
        runs.append(calls)
    one, two = runs
    together = one[: 2 + 2 * ahead] + two[:2] + one[2 + 2 * ahead :]
    assert len(called(together)) == 4 + 2 * ahead
    # A run that was broken off and is made again from the same noise isn't two.
    for broken in range(1, 9):
        again = called(one[:broken] + one)
        assert again[broken:] == [(1, s, b) for s in range(8) for b in (0, 1)] or broken <= 2
        assert len(again) == broken + 16
        assert called(two[:broken] + one)[broken:] == [(1, s, b) for s in range(8) for b in (0, 1)]
