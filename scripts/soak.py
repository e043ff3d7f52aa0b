"""Random schedules against the device, for so many minutes: every answer must equal its single run.

Usage: .venv/bin/python scripts/soak.py MINUTES [--seed N] [--only]

Engines of 1, 3, 5 and 8 rows, with few pages, are used again and again on a tiny random pair (tests/helpers.py); an
answer is its ids, its trace and why it ended, a cancelled one the beginning of that. After every step host, device and
pages are compared. The last line is one JSON document. Exits 1 at the first mismatch, with the seed that leads to it:
`soak.py 1 --seed N --only` plays that schedule alone, on new engines.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ["TORCH_DFLASH_DEBUG"] = "1"

from helpers import load, write_drafter, write_target
from schedules import Alone, check_answer, device_engine, device_schedule, play

from torch_dflash.engine import Engine

ROWS = (1, 3, 5, 8)


def one(seed: int, engines: list[Engine], alone: Alone, seen: Counter[str]) -> None:
    """The schedule of a seed. Raises AssertionError."""
    source = random.Random(seed)
    engine, arrivals = source.choice(engines), device_schedule(source)
    expected = [alone(arrival.request, engine) for arrival in arrivals]
    for arrival, run, answer in zip(arrivals, play(engine, arrivals, seen), expected, strict=True):
        check_answer(run, answer, arrival.cancel_at is not None)
    seen["requests"] += len(arrivals)


def soak(minutes: float, seed: int, only: bool) -> bool:
    """Play schedules, print the figures. True if all is well."""
    mismatch, seen, begin = None, Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_target(Path(folder) / "target")
        write_drafter(Path(folder) / "draft")
        tiny = load(Path(folder))
        engines, alone = [device_engine(tiny, rows) for rows in ROWS], Alone(tiny)
        try:
            while seen["schedules"] == 0 or (not only and time.monotonic() - begin < 60 * minutes):
                one(seed, engines, alone, seen)
                seed += 1
        except Exception:
            traceback.print_exc()
            mismatch = seed
        for engine in engines:
            seen.update(engine.device.seen)
    minutes = round((time.monotonic() - begin) / 60, 2)
    print(json.dumps(dict(sorted(seen.items())) | {"minutes": minutes, "mismatches": int(mismatch is not None)}))
    if mismatch is not None:
        print(f"reproduce with: scripts/soak.py 1 --seed {mismatch} --only", file=sys.stderr)
    return mismatch is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="of the first schedule")
    parser.add_argument("--only", action="store_true", help="play the schedule of --seed and no other")
    arguments = parser.parse_args()
    print(f"first seed {arguments.seed}", flush=True)
    sys.exit(0 if soak(arguments.minutes, arguments.seed, arguments.only) else 1)


if __name__ == "__main__":
    main()
