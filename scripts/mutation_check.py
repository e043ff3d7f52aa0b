"""Shows that the test suite catches the faults of faults.py, planted one at a time.

Usage: .venv/bin/python scripts/mutation_check.py [NAME ...]. Each fault gets the whole suite, which stops at the first
failure; test files that usually see such faults come first. Exit code 1 if a fault survives. Takes about a minute a
fault.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIRST = ("reference", "rows", "decode", "dispatch", "golden")


def test_files() -> list[str]:
    """All of them, the likely ones first."""
    first = [ROOT / "tests" / f"test_{name}.py" for name in FIRST]
    return [str(path) for path in (*first, *sorted(set((ROOT / "tests").glob("test_*.py")) - set(first)))]


def failing_test(name: str) -> str | None:
    """The first test that fails with the fault planted; None if none does."""
    environment = os.environ | {"TORCH_DFLASH_FAULT": name, "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "faults", "--no-header", *test_files()]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{name}: the tests could not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found.group(1) if done.returncode else None


def main() -> int:
    sys.path.insert(0, str(ROOT / "scripts"))
    from faults import FAULTS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *FAULTS], metavar="NAME", help=", ".join(FAULTS))
    survivors = 0
    for name in parser.parse_args().names or FAULTS:
        begin = time.perf_counter()
        found = failing_test(name)
        survivors += found is None
        print(f"{name:40s} {found or 'SURVIVES'}  ({time.perf_counter() - begin:.0f} s)", flush=True)
    print(f"{survivors} fault(s) survive" if survivors else "every fault is caught")
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main())
