"""Prometheus 2 as Debian ships it, taken out of its package without installing that.

It answers queries and scrapes targets listed in a file at once, where building Prometheus 3 takes
minutes; it has no Kubernetes discovery.
"""

import subprocess
import tempfile
from pathlib import Path

from localcluster import packages
from localcluster.steps import ClusterError, cache_dir, step

PROMETHEUS_2 = "prometheus-2"


def prometheus_2() -> Path:
    """Path of the binary; fetched with apt-get on first use."""
    target = cache_dir() / "bin" / PROMETHEUS_2 / "prometheus"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        step("Prometheus 2 out of Debian's package"),
        tempfile.TemporaryDirectory(dir=target.parent) as scratch,
    ):
        # apt's sandbox user must be able to write here, or apt warns.
        Path(scratch).chmod(0o777)
        if not _run(["apt-get", "-qq", "download", "prometheus"], scratch):
            packages.update_lists()
            if not _run(["apt-get", "-qq", "download", "prometheus"], scratch):
                raise ClusterError(
                    "apt-get found no package 'prometheus': use Debian or Ubuntu, or build "
                    "Prometheus 3 with 'hack/cluster/build prometheus'"
                )
        package = next(Path(scratch).glob("prometheus_*.deb"))
        if not _run(["dpkg-deb", "--extract", package.name, "tree"], scratch):
            raise ClusterError(f"{package.name} could not be unpacked with dpkg-deb")
        Path(scratch, "tree/usr/bin/prometheus").rename(target)
    return target


def _run(command: list[str], folder: str) -> bool:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0
