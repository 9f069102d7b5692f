"""How many threads to compute with: as many as the control group really gives.

A Pod sees all of its node's cores, but its CPU limit throttles it. With more threads than whole
CPUs in the limit, they burn the quota waiting for each other and then all stand still until the
next period; one thread is never worse than that.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

THREADS_VARIABLE = "KVSCALER_THREADS"


class ThreadsError(ValueError):
    """`KVSCALER_THREADS` is not a positive whole number."""


def thread_count(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Threads to compute with: `KVSCALER_THREADS`, else whole CPUs of affinity and limit, ≥ 1.

    Raises:
        ThreadsError: the variable is set to something else than a positive whole number.
    """
    if chosen := os.environ.get(THREADS_VARIABLE):
        if not chosen.isdecimal() or int(chosen) < 1:
            raise ThreadsError(
                f"{THREADS_VARIABLE} is {chosen!r}; set a whole number of at least 1"
            )
        return int(chosen)
    cpus = len(os.sched_getaffinity(0))
    limit = cpu_limit(cgroup_root, proc)
    return cpus if limit is None else max(1, min(cpus, int(limit)))


def cpu_limit(cgroup_root: Path, proc: Path) -> float | None:
    """The tightest CPU limit of this process's control groups in CPUs; `None` without one.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`), at the process's own group
    and every parent that is visible: limits of parents (the Pod's) bind too.
    """
    limits = [
        limit
        for folder in _group_folders(cgroup_root, proc)
        if (limit := _limit_of(folder)) is not None
    ]
    return min(limits, default=None)


def _group_folders(cgroup_root: Path, proc: Path) -> Iterator[Path]:
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy == "0":
            mounts = [cgroup_root, cgroup_root / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [cgroup_root / controllers, cgroup_root / "cpu"]
        else:
            continue
        path = PurePosixPath(group.lstrip("/"))
        # In a container the mount may already show only its own group: hence the root as well.
        for part in (path, *path.parents):
            yield from (mount / part for mount in mounts)


def _limit_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None  # no such group here, or "max": no limit at this level
