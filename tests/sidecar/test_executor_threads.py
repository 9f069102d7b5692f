"""Threads from the control group's CPU limit, versions 1 and 2."""

from pathlib import Path

import pytest
from kvscaler_sidecar.executors.threads import ThreadsError, cpu_limit, thread_count


def group(root: Path, path: str, **files: str) -> None:
    folder = root / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(content + "\n")


def proc(root: Path, *lines: str) -> Path:
    (root / "self").mkdir(parents=True)
    (root / "self/cgroup").write_text("\n".join(lines) + "\n")
    return root


def test_version_2_takes_the_tightest_of_group_and_parents(tmp_path: Path) -> None:
    group(tmp_path / "cg", "/", cpu_max="max 100000")
    group(tmp_path / "cg", "/pod", cpu_max="150000 100000")
    group(tmp_path / "cg", "/pod/engine", cpu_max="400000 100000")
    assert cpu_limit(tmp_path / "cg", proc(tmp_path / "proc", "0::/pod/engine")) == 1.5


def test_version_1_in_a_container_sees_its_group_at_the_mount(tmp_path: Path) -> None:
    group(
        tmp_path / "cg",
        "/cpu,cpuacct",
        cpu_cfs_quota_us="30000",
        cpu_cfs_period_us="100000",
    )
    line = "4:cpu,cpuacct:/kubepods/burstable/pod1/engine"
    assert cpu_limit(tmp_path / "cg", proc(tmp_path / "proc", line)) == 0.3
    assert thread_count(tmp_path / "cg", tmp_path / "proc") == 1


def test_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path / "cg", "/cpu", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    group(tmp_path / "cg", "/unified", cpu_max="max 100000")
    folder = proc(tmp_path / "proc", "1:cpu:/", "0::/")
    assert cpu_limit(tmp_path / "cg", folder) is None
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert thread_count(tmp_path / "cg", folder) == 3


def test_without_control_groups_affinity_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert thread_count(tmp_path / "none", tmp_path / "none") == 2


def test_limit_above_the_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path / "cg", "/", cpu_max="800000 100000")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert thread_count(tmp_path / "cg", proc(tmp_path / "proc", "0::/")) == 2


def test_variable_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSCALER_THREADS", "7")
    assert thread_count() == 7
    for wrong in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("KVSCALER_THREADS", wrong)
        with pytest.raises(ThreadsError, match=wrong):
            thread_count()
