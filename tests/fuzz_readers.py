"""Damaged files against the readers: python tests/fuzz_readers.py --seconds 600 --seed 0.

Real files that ship, and the same masks in torch's and safetensors' form, are damaged: bits are
turned, stretches cut out, doubled, overwritten or put elsewhere, numbers replaced by others. A
reader may refuse with an error of ours that names the file. What it gives in spite of the damage
is compared where the format has a checksum: then it must be what the file held before. Anything
else is printed, with the seed that makes it again, and the exit code is 1.

Not collected by pytest; `tests/test_fuzz.py` runs a short one.
"""

from __future__ import annotations

import argparse
import collections
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wavealign.errors import WaveAlignError
from wavealign.guard.profile import load_guard_profile
from wavealign.masks import load_mask
from wavealign.order import build_schedule
from wavealign.order.schedule import Schedule
from wavealign.runs.files import load_rows
from wavealign.sim.devices import load_device
from wavealign.sweep.space import load_table

ROOT = Path(__file__).parents[1]
ROOM_BYTES = 6 << 30  # of addresses, beyond what the process has at the start
NUMBERS = (b"NaN", b"-1", b"1e999", b"9" * 400, b"0", b"null", b'"5"', b"[1]", b"1.5", b"{}")


@dataclass(frozen=True)
class Target:
    """A file and what reads it; `summed` where the format has checksums of all that is read."""

    path: Path
    read: Callable[[str], object]
    summed: bool


def mask_of(path: str) -> str:
    return load_mask(path).mask.digest


def rows_of(path: str) -> int:
    return len(load_rows([path]).rows)


def targets(folder: Path) -> list[Target]:
    """Small files of every kind."""
    import torch
    from safetensors.torch import save_file

    packed = ROOT / "data/h200/video_1156h2.npz"
    mask = load_mask(packed).mask.select_heads([0])
    dense = torch.from_numpy(np.stack([head.to_dense() for head in mask.heads()])[:, :160, :160])
    block = torch.tensor([128, 128])
    torch.save({"mask": dense, "block_size": block}, folder / "mask.pt")
    save_file({"mask": dense.contiguous(), "block_size": block}, folder / "mask.safetensors")
    np.savez_compressed(folder / "mask.npz", mask=dense.numpy(), block_size=block.numpy())
    np.savez(folder / "plain.npz", mask=dense.numpy(), block_size=block.numpy())
    build_schedule(load_mask(folder / "mask.npz").mask, "resync", 16).save(folder / "schedule.npz")
    lines = (ROOT / "data/resync.runs.jsonl").read_text().splitlines()[:6]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("sim", "guard"):
        shutil.copy(ROOT / f"wavealign/{name}/profiles/h200.toml", folder / f"{name}.toml")
    (folder / "space.toml").write_text(
        'policies = ["resync", "kmeans(k={k})"]\n[parameters]\nk = [8, 16]\n'
    )

    def schedule_of(path: str) -> bytes:
        schedule = Schedule.load(path)
        return schedule.row_order.tobytes() + schedule.indices.tobytes()

    return [
        Target(packed, mask_of, True),
        Target(folder / "mask.npz", mask_of, True),
        Target(folder / "plain.npz", mask_of, True),
        Target(folder / "mask.pt", mask_of, True),
        Target(folder / "mask.safetensors", mask_of, False),
        Target(folder / "schedule.npz", schedule_of, True),
        Target(folder / "rows.jsonl", rows_of, False),
        Target(folder / "sim.toml", lambda path: load_device(path) and 0, False),
        Target(folder / "guard.toml", lambda path: load_guard_profile(path) and 0, False),
        Target(folder / "space.toml", lambda path: len(load_table(path)), False),
    ]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content with one to four changes."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        length = min(rng.choice((1, 2, 4, 8, 64, 1024)), len(found) - at)
        match rng.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = found[at : at + length]
            case 3:
                found[at : at + length] = rng.randbytes(length)
            case 4:
                from_ = rng.randrange(len(found) + 1)
                found[at : at + length] = found[from_ : from_ + length]
            case 5:
                del found[at:]
            case _:
                digits = [i for i in range(at, min(at + 400, len(found))) if 48 <= found[i] < 58]
                if digits:
                    found[digits[0] : digits[0] + 1] = rng.choice(NUMBERS)
    return bytes(found)


def one(target: Target, wanted: object, path: Path, seed: int) -> str:
    """How a reader takes one damaged file: "refused", "read", or what is wrong with it."""
    content = target.path.read_bytes()
    changed = damaged(content, random.Random(seed))
    path.write_bytes(changed)
    try:
        found = target.read(str(path))
    except WaveAlignError as error:
        named = path.name in str(error) or str(path) in str(error)
        return "refused" if named else f"doesn't name the file: {str(error)[:200]}"
    except MemoryError:
        return "runs out of memory"
    except Exception:
        return traceback.format_exc(limit=-2)
    if target.summed and changed != content and found != wanted:
        return "gives another answer"
    return "read"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, help="at most; each damages every file once")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: dict[str, collections.Counter[str]] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        chosen = targets(Path(name))
        wanted = [target.read(str(target.path)) for target in chosen]
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
        started, seed = time.monotonic(), options.seed
        last = seed + options.rounds if options.rounds is not None else None
        while time.monotonic() - started < options.seconds and seed != last:
            for target, right in zip(chosen, wanted, strict=True):
                path = Path(name) / f"damaged{seed}{target.path.suffix}"
                how = one(target, right, path, seed)
                path.unlink()
                counts.setdefault(target.path.name, collections.Counter())[how.split("\n")[0]] += 1
                if how not in ("read", "refused"):
                    wrong += 1
                    print(f"{target.path.name}, seed {seed}: {how}", flush=True)
            seed += 1
    for file, found in counts.items():
        print(f"{file}: {', '.join(f'{n} {how}' for how, n in found.most_common())}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{seed - options.seed} rounds, {wrong} wrong, at most {peak:.1f} GiB in memory")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
