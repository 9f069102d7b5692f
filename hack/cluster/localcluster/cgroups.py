"""The control groups that a cluster's Pods live under: made before the kubelet, removed after it.

Version 1 (one hierarchy per controller, the named `systemd` one included, all of which the kubelet
asks for) and version 2 (one hierarchy; the controllers must be passed down from the root).
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from localcluster.steps import ClusterError, wait_until

ROOT = Path("/sys/fs/cgroup")
NEEDED_V1 = ("cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "freezer", "blkio")
NEEDED_V2 = ("cpu", "cpuset", "memory", "pids", "io")
REMOVE_TIMEOUT_SECONDS = 5


def is_version_2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def missing_controllers() -> list[str]:
    """Controllers that the kubelet and runc need and that this kernel does not offer."""
    if is_version_2():
        offered = (ROOT / "cgroup.controllers").read_text().split()
        return [name for name in NEEDED_V2 if name not in offered]
    return [name for name in NEEDED_V1 if not (ROOT / name).is_dir()]


def create(name: str) -> None:
    if is_version_2():
        enable = " ".join(f"+{controller}" for controller in NEEDED_V2)
        (ROOT / "cgroup.subtree_control").write_text(enable)
        (ROOT / name).mkdir(exist_ok=True)
        return
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group: nothing could run
            if (group / setting).exists():
                (group / setting).write_text((hierarchy / setting).read_text())


def remove(name: str) -> None:
    """Remove the group and all below it, once its last process has left. Fine when absent."""

    def gone() -> bool:
        for group in groups(name):
            for folder, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):  # busy for some more milliseconds
                    Path(folder).rmdir()
        return not list(groups(name))

    try:
        wait_until(gone, f"control group {name} is empty", REMOVE_TIMEOUT_SECONDS)
    except ClusterError as error:
        left = ", ".join(map(str, groups(name)))
        raise ClusterError(f"{left}: still in use by a process") from error


def groups(name: str) -> Iterator[Path]:
    """The existing folders of this group, one per hierarchy."""
    if is_version_2():
        candidates = [ROOT / name]
    else:  # runc also makes groups in a `unified` hierarchy beside those of version 1
        candidates = [hierarchy / name for hierarchy in [*_hierarchies(), ROOT / "unified"]]
    return (group for group in candidates if group.is_dir())


def _hierarchies() -> list[Path]:
    """Version 1 hierarchies; co-mounted ones appear once."""
    mounted = {entry.resolve() for entry in ROOT.iterdir() if entry.is_dir()}
    return sorted(entry for entry in mounted if entry.name != "unified")
