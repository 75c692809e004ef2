"""Times by a clock of the test's own: the order of turns, medians, the steady state."""

import pytest

pytest.importorskip("torch")
from on_cpu import Readings

from wavealign.gpu.rig import Rig
from wavealign.gpu.timing import SingleTime, time_call, time_single, time_steady


class Clock(Rig):
    """Its time goes on only where a launch says how long it takes; it logs what is asked."""

    def __init__(self):
        super().__init__()
        self.now, self.log, self.marks = 0.0, [], 0

    def seconds(self):
        return self.now

    def time_ms(self, run):
        self.log.append("timed")
        return super().time_ms(run)

    def pauser(self):
        return lambda turn: self.log.append(("pause", turn))

    def synchronize(self):
        self.log.append("synchronize")

    def mark(self):
        self.marks += 1
        number = self.marks
        self.log.append(("mark", number))
        return lambda: self.log.append(("wait", number))

    def launch(self, name, *lasts_s):
        """A launch that is logged, and takes these times in turn, the last one from then on."""
        left = list(lasts_s)

        def run():
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_candidates_take_turns_and_each_round_begins_with_another_one():
    rig = Clock()
    launches = {name: rig.launch(name, 0.5) for name in "abc"}
    found = time_single(launches, 4, rig)
    rounds = ["abc", "bca", "cab", "abc"]
    turns = [
        event
        for turn, names in enumerate(rounds)
        for name in names
        for event in (("pause", turn), "timed", name)
    ]
    assert rig.log == ["a", "b", "c", "synchronize", *turns]
    assert found == dict.fromkeys("abc", SingleTime((500.0,) * 4))


def test_a_launch_is_timed_without_its_warm_up():
    rig = Clock()
    times_s = [9.0, 0.25, 0.5, 0.125]  # 9 s: compiling
    (found,) = time_single({"a": rig.launch("a", *times_s)}, 3, rig).values()
    assert found == SingleTime((250.0, 500.0, 125.0))
    assert time_call(rig.launch("b", 9.0, 1.0, 5.0, 2.0, 4.0, 3.0), rig) == 3000.0
    assert rig.log[-11:] == ["b", *["timed", "b"] * 5]


@pytest.mark.parametrize(
    ("times_ms", "median_ms", "spread_frac"),
    [
        ((4.0,), 4.0, 0.0),
        ((3.0, 1.0, 2.0), 2.0, 1.0),  # too few for quartiles: all of it
        ((7.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 4.0, 1.0),  # the middle half is 2 to 6
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1000.0), 1.0, 0.0),
    ],
)
def test_median_and_middle_half(times_ms, median_ms, spread_frac):
    time = SingleTime(times_ms)
    assert time.median_ms == median_ms
    assert time.spread_frac == pytest.approx(spread_frac)


def test_the_steady_state_is_wall_time_over_whole_batches():
    """62.5 ms a launch: three are closest to 0.2 s. Two such batches settle, three are measured."""
    rig = Clock()
    found = time_steady(rig.launch("run", 0.0625), 0.3, 0.55, rig, Readings())
    assert rig.log.count("run") == 2 + 2 * 3 + 3 * 3
    assert rig.log.count("synchronize") == 2
    assert (found.time_ms, found.repeats) == (62.5, 9)
    assert found.energy_j == pytest.approx(100 / 9)
    assert (found.clock_ghz, found.power_w, found.temperature_c) == (1.5, 650.0, 70.0)
    assert found.throttle == "a,b"


def test_what_the_card_does_not_say_is_none():
    rig = Clock()
    found = time_steady(
        rig.launch("run", 0.5), 0.1, 0.1, rig, Readings(energy_j=None, throttle=None)
    )
    assert (found.energy_j, found.throttle) == (None, None)
    none = time_steady(rig.launch("run", 0.5), 0.1, 0.1, rig, Readings(throttle=()))
    assert none.throttle == ""


def test_the_host_stays_one_batch_ahead():
    """While a batch runs the next one is queued; the one after waits for the first."""
    rig = Clock()
    time_steady(rig.launch("run", 0.125), 0.0, 0.75, rig, Readings())
    batch = ["run"] * 2
    assert rig.log[4:] == [  # after those that say how many launches make a batch
        *batch, ("mark", 1),
        *batch, ("mark", 2), ("wait", 1),
        *batch, ("mark", 3), ("wait", 2),
        "synchronize",
    ]  # fmt: skip


def test_on_the_cpu_time_is_the_hosts():
    rig = Rig()
    times = time_single({"a": lambda: sum(range(1000))}, 3, rig)["a"].times_ms
    assert len(times) == 3
    assert all(0 < time < 1000 for time in times)
    assert rig.reader(2**20)() == 2**18
