"""What comes from the machine's distribution: containerd, runc, the network plugins and iptables."""

import os
import shutil
import subprocess
from pathlib import Path

from localcluster.steps import ClusterError, step

# By command: the Debian package that brings it.
TOOLS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "mount": "mount",
}
NETWORK_PLUGIN_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
NETWORK_PLUGINS_PACKAGE = "containernetworking-plugins"
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _find(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}")


def tool(command: str) -> Path:
    """The installed command. Raises ClusterError when it is missing."""
    found = _find(command)
    if found is None:
        raise ClusterError(f"{command} is not installed: install {TOOLS[command]}")
    return Path(found).resolve()


def network_plugins() -> Path:
    """The folder that holds the container network plugins."""
    for folder in NETWORK_PLUGIN_FOLDERS:
        if (folder / "bridge").exists():
            return folder
    raise ClusterError(
        f"no container network plugins in {', '.join(map(str, NETWORK_PLUGIN_FOLDERS))}: "
        f"install {NETWORK_PLUGINS_PACKAGE}"
    )


def missing() -> list[str]:
    """Debian packages whose commands are not there."""
    wanted = {package for command, package in TOOLS.items() if _find(command) is None}
    if not any((folder / "bridge").exists() for folder in NETWORK_PLUGIN_FOLDERS):
        wanted.add(NETWORK_PLUGINS_PACKAGE)
    return sorted(wanted)


def ensure() -> None:
    """Install what is missing with apt-get. Raises ClusterError where that is not possible."""
    wanted = missing()
    if not wanted:
        return
    if _find("apt-get") is None:
        raise ClusterError(
            f"missing here: {', '.join(wanted)} (Debian's names), and there is no apt-get: "
            "install them with this system's package manager"
        )
    with step(f"apt-get install {' '.join(wanted)}"):
        update_lists()
        _apt_get("install", "--yes", "--no-install-recommends", *wanted)


def update_lists() -> None:
    """Fetch apt's package lists anew."""
    _apt_get("update")


def _apt_get(*arguments: str) -> None:
    # Another apt may be at work, as on a machine that has just been started.
    command = ["apt-get", "-qq", "--option=DPkg::Lock::Timeout=120", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
