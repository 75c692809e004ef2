"""Sweeps that are killed, and how sweeps use the cores. Prints what happened.

    pip install '.[sweep,ray,dask]'
    python benchmarks/sweep_acceptance.py [local] [ray] [dask] [scaling]

For each executor: 200 trials on shipped masks with two workers. The whole sweep is killed (SIGKILL)
half-way and started again; then one worker is killed. Every trial has to be there once, and
`results.jsonl` the same, byte for byte, as that of a serial run (`--jobs 1`, local) without
interruption. Exit code 1 where it isn't.

scaling: trials per minute of two local workers / of one, both warm, in turns, in one run; medians
of the rounds. Beside it, what the machine itself gives two processes at that time: where others use
its cores, less than 2.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT

MASKS = ("data/xattention_75600.npz", "data/clip/xattention_75600.npz")
SPACE = """
policy = ["original", "random", "svd", "nnz", "nnz-wave", "svd+nnz", "lockstep", "nnz/{visits}"]
visits = ["shuffled", "sawtooth", "phased"]
device = ["h100", "a40"]
seed = [0, 1, 2, 3, 4]
heads = "0"
"""
TRIALS = 200
ROUNDS = 5


def command(folder: Path, out: Path, *more: str) -> list[str]:
    masks = [part for mask in MASKS for part in ("--mask", str(ROOT / mask))]
    program = str(Path(sys.executable).parent / "wavealign")
    space = str(folder / "space.toml")
    return [program, "sweep", *masks, "--space", space, "--out", str(out), *more]


def stored(out: Path) -> list[str]:
    """Identities of the trials on disk, from whole lines."""
    texts = [path.read_text() for path in (out / "trials").glob("*.jsonl")]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    return [json.loads(line)["id"] for line in lines if line.endswith("\n")]


def workers(out: Path) -> set[int]:
    return {int(path.stem.rpartition("-")[2]) for path in (out / "trials").glob("*.jsonl")}


def killed(folder: Path, executor: str, expected: bytes) -> bool:
    """Kill and resume; whether nothing was lost, repeated or changed."""
    out = folder / executor
    whole = command(folder, out, "--executor", executor, "--jobs", "2", "--quiet")
    log = (folder / f"{executor}.log").open("w+")

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(whole, stdout=log, stderr=log)

    first = start()
    while first.poll() is None and len(stored(out)) < TRIALS // 2:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept, old = len(stored(out)), workers(out)
    second = start()
    victim = None
    while second.poll() is None:
        new = workers(out) - old
        if victim is None and new and len(stored(out)) >= kept + 10:
            victim = min(new)
            os.kill(victim, signal.SIGKILL)
        time.sleep(0.02)
    found = stored(out)
    same = (out / "results.jsonl").read_bytes() == expected
    once = len(found) == len(set(found)) == TRIALS
    print(
        f"{executor:6} killed after {kept} of {TRIALS} trials, resumed, worker {victim} killed: "
        f"exit code {second.returncode}, {len(found)} records of {len(set(found))} trials, results "
        f"{'identical to' if same else 'DIFFERENT from'} the serial run's"
    )
    good = same and once and second.returncode == 0 and victim is not None and kept < TRIALS
    if not good:
        log.seek(0)
        print(log.read()[-4000:])
    return good


def acceptance(executors: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "space.toml").write_text(SPACE)
        serial = folder / "serial"
        subprocess.run(
            command(folder, serial, "--jobs", "1", "--quiet"), check=True, stdout=subprocess.DEVNULL
        )
        expected = (serial / "results.jsonl").read_bytes()
        print(f"serial run: {len(expected.splitlines())} rows")
        verdicts = [killed(folder, executor, expected) for executor in executors]
        return all(verdicts)


def independent(processes: int, seconds: float = 1.0) -> int:
    """Loops that so many processes, which share nothing, get through in a while."""
    code = (
        "import time\nend = time.perf_counter() + " + str(seconds) + "\nn = 0\n"
        "while time.perf_counter() < end:\n    sum(range(1000)); n += 1\nprint(n)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    return sum(int(process.communicate()[0]) for process in started)


def scaling() -> None:
    from wavealign.sweep.conditions import resolve_conditions
    from wavealign.sweep.engines.job import Job
    from wavealign.sweep.engines.local import LocalEngine
    from wavealign.sweep.masks import find_masks
    from wavealign.sweep.search import GridSearch
    from wavealign.sweep.space import make_space

    space = make_space(
        {
            "policy": ["original", "nnz", "nnz-wave", "svd+nnz", "lockstep", "resync"],
            "seed": list(range(6)),
            "heads": "0",
        },
        {},
    )
    masks = find_masks([str(ROOT / "data/h200/video_1156h2.npz")])
    baselines, inputs = resolve_conditions(space, masks)
    specs = list(iter(GridSearch(space, baselines, print).ask, None))

    def minutes(engine: LocalEngine) -> float:
        start = time.perf_counter()
        in_flight = 0
        for spec in specs:
            if in_flight == 2 * engine.slots:
                engine.next()
                in_flight -= 1
            engine.submit(Job((spec,)))
            in_flight += 1
        for _ in range(in_flight):
            engine.next()
        return (time.perf_counter() - start) / 60

    ratios, rates, apart = [], [], []
    with LocalEngine(inputs, 1) as one, LocalEngine(inputs, 2) as two:
        for _ in range(2):  # imports, and kernels from their cache
            minutes(one), minutes(two)
        for _ in range(ROUNDS):
            alone = minutes(one)
            both = minutes(two)
            ratios.append(alone / both)
            rates.append((len(specs) / alone, len(specs) / both))
            apart.append(independent(2) / independent(1))
    one_rate, two_rate = (statistics.median(rate) for rate in zip(*rates, strict=True))
    print(
        f"scaling: {one_rate:.0f} trials/min with one worker, {two_rate:.0f} with two: "
        f"{statistics.median(ratios):.2f}x (rounds: {', '.join(f'{r:.2f}' for r in ratios)}; load "
        f"average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    )
    print(
        f"this machine at that time: two processes that count apart from each other do "
        f"{statistics.median(apart):.2f}x of what one does ({', '.join(f'{r:.2f}' for r in apart)})"
    )


def main() -> None:
    asked = sys.argv[1:] or ["local", "ray", "dask", "scaling"]
    executors = [name for name in asked if name != "scaling"]
    good = acceptance(executors) if executors else True
    if "scaling" in asked:
        scaling()
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
