"""What this machine must have before a node can run on it, each lack said with its cure."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from localcluster import cgroups
from localcluster.layout import SLOT_STATE_ROOT
from localcluster.steps import ClusterError, cache_dir

DISK_NEEDED_BYTES = 2 << 30
BRIDGE_FILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


def require_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError(
            "a node needs root (namespaces, mounts, control groups): run this as root. "
            "Without root, 'hack/cluster/up --only control-plane' gives an API server alone"
        )


def check() -> None:
    """Raises ClusterError that lists everything missing at once."""
    require_root()
    faults = [*_kernel_faults(), *_disk_faults()]
    if faults:
        raise ClusterError("this machine can't run a node:\n  - " + "\n  - ".join(faults))


def _kernel_faults() -> list[str]:
    faults = []
    if not BRIDGE_FILTER.exists():
        _load_module("br_netfilter")
    if not BRIDGE_FILTER.exists():
        faults.append(
            "the kernel has no bridge netfilter (CONFIG_BRIDGE_NETFILTER): Pods on one node could "
            "not reach each other's Services; try 'modprobe br_netfilter'"
        )
    if lacking := cgroups.missing_controllers():
        faults.append(
            f"no control group controller {', '.join(lacking)} under {cgroups.ROOT}: mount them, "
            "or allow this environment to use them"
        )
    unshare = ["unshare", "--net", "--pid", "--fork", "--mount", "true"]
    if (words := _failure_of(unshare)) is not None:
        faults.append(f"no network, process or mount namespaces may be made here: {words}")
    elif (words := _overlay_failure()) is not None:
        faults.append(
            f"overlayfs can't be mounted on {cache_dir()}: {words}; set KVSCALER_CACHE_DIR to a "
            "folder on an ordinary disk (overlayfs does not stack on overlayfs)"
        )
    return faults


def _overlay_failure() -> str | None:
    """Try a mount in a namespace that ends with the command; the reason when it fails."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    if "overlay" not in Path("/proc/filesystems").read_text():
        _load_module("overlay")
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=cache_dir()) as scratch:
        folders = [Path(scratch, name) for name in ("lower", "upper", "work", "merged")]
        for folder in folders:
            folder.mkdir()
        lower, upper, work, merged = folders
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
        return _failure_of(["unshare", "--mount", *mount])


def _disk_faults() -> list[str]:
    faults = []
    for folder in (cache_dir(), SLOT_STATE_ROOT):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free_bytes = shutil.disk_usage(existing).free
        if free_bytes < DISK_NEEDED_BYTES:
            faults.append(
                f"{folder} has {free_bytes / 2**30:.1f} GiB free and a cluster needs "
                f"{DISK_NEEDED_BYTES / 2**30:.0f}"
            )
    return faults


def _load_module(name: str) -> None:
    if shutil.which("modprobe"):
        subprocess.run(["modprobe", name], capture_output=True, check=False)


def _failure_of(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    first_line, _, _ = done.stderr.strip().partition("\n")
    return first_line or f"exit code {done.returncode}"
