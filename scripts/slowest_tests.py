"""The slowest tests of a run.

    python scripts/slowest_tests.py 30 build/tests/*.xml

reads the JUnit files that `make test` and the jobs of `make test-all` write and prints, slowest first, seconds, job and test.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def main(count: int, files: list[Path]) -> None:
    """Print the `count` slowest tests of all files, then each file's number of tests and their seconds, summed over workers."""
    found: list[tuple[float, str, str]] = []
    for file in files:
        found += [
            (float(case.get("time", 0)), file.stem, f"{case.get('classname')}::{case.get('name')}")
            for case in ElementTree.parse(file).iter("testcase")
        ]
    for seconds, job, name in sorted(found, reverse=True)[:count]:
        print(f"{seconds:7.1f} s  {job}  {name}")
    for file in files:
        times = [seconds for seconds, job, _ in found if job == file.stem]
        print(f"{sum(times):7.0f} s  {file.stem}: {len(times)} tests")


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
