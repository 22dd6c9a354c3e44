"""The number of the kernels' threads: from the environment, the affinity, and control groups as Linux writes them."""

import os

import pytest

from hfax.errors import InvalidInputError
from hfax.kernels.cpu import threads


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv(threads.VARIABLE, raising=False)


_V2, _V1 = "0::/jobs/mine\n", "5:memory:/mine\n4:cpu,cpuacct:/mine\n0::/\n"


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("", {}, 8),  # no control groups
        (_V2, {}, 8),  # a container's own name for its group, which it does not see
        (_V2, {"jobs/mine/cpu.max": "max 100000\n"}, 8),
        (_V2, {"jobs/mine/cpu.max": "200000 100000\n"}, 2),
        (_V2, {"jobs/mine/cpu.max": "250000 100000\n"}, 3),  # more than two cores' time
        (_V2, {"jobs/mine/cpu.max": "20000 100000\n"}, 1),
        (_V2, {"jobs/mine/cpu.max": "6400000 100000\n"}, 8),
        (_V2, {"jobs/mine/cpu.max": "max 100000\n", "jobs/cpu.max": "300000 100000\n"}, 3),  # of the group above
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),  # within a namespace of control groups
        (_V2, {"cpu.max": "400000 100000\n"}, 4),
        (_V1, {"cpu,cpuacct/mine/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/mine/cpu.cfs_period_us": "100000\n"}, 8),
        (_V1, {"cpu,cpuacct/mine/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/mine/cpu.cfs_period_us": "20000\n"}, 3),
        (_V1, {"cpu/cpu.cfs_quota_us": "500000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 5),
        ("4:cpuset:/mine\n", {"cpu/mine/cpu.cfs_quota_us": "100\n", "cpu/mine/cpu.cfs_period_us": "100\n"}, 8),
    ],
)
def test_usable_cores_are_those_of_the_affinity_and_of_the_control_groups(tmp_path, group, files, cores):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(group)
    for name, text in files.items():
        path = tmp_path / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert threads.usable_cores(tmp_path) == cores


def test_a_process_without_control_groups_has_its_affinity(tmp_path, monkeypatch):
    assert threads.usable_cores(tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert threads.usable_cores(tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert threads.usable_cores(tmp_path) == 6


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv(threads.VARIABLE, "12")
    assert threads.num_threads() == 12
    monkeypatch.setenv(threads.VARIABLE, "")
    assert threads.num_threads() == threads.usable_cores()


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_another_number_of_threads_is_refused(monkeypatch, text):
    monkeypatch.setenv(threads.VARIABLE, text)
    with pytest.raises(InvalidInputError, match="not a number of threads"):
        threads.num_threads()
