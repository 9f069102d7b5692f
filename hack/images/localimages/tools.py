"""The programs that build images, and how one of them is run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from localcluster.steps import ClusterError, say, step

from localimages import layout

SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = ("buildah", "debootstrap")


def find(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}")


def ensure() -> None:
    """Install buildah and debootstrap from the distribution where they are missing.

    Raises:
        ClusterError: not root, or the distribution can't bring them.
    """
    if os.geteuid() != 0:
        raise ClusterError("building images needs root (chroot, overlay mounts): run this as root")
    missing = [package for package in PACKAGES if find(package) is None]
    if not missing:
        return
    if find("apt-get") is None:
        raise ClusterError(
            f"missing here: {', '.join(missing)}, and there is no apt-get: install them with this "
            "system's package manager"
        )
    with step(f"apt-get install {' '.join(missing)}"):
        run(["apt-get", "-qq", "update"])
        run(["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing])


def run(command: list[str], *, watch: bool = False) -> str:
    """Run a command and return its standard output; with `watch` its words go to the terminal.

    Raises:
        ClusterError: it failed; with the end of what it said.
    """
    temporary = layout.folder() / "tmp"  # buildah keeps whole layers there, /var/tmp may be small
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}",
        "TMPDIR": str(temporary),
        "DEBIAN_FRONTEND": "noninteractive",
    }
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if watch else subprocess.PIPE,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        words = f"{done.stdout}\n{done.stderr or ''}".strip().splitlines()[-25:]
        raise ClusterError(f"{' '.join(command)} failed:\n" + "\n".join(words))
    return done.stdout


def uv_folder() -> Path:
    """A folder that holds the `uv` binary and nothing else, to be mounted into builds."""
    beside = Path(sys.executable).parent / "uv"
    source = str(beside) if beside.is_file() else find("uv")
    if source is None:
        raise ClusterError(
            f"uv is not installed beside {sys.executable}: run 'make setup', or set PYTHON_BIN to "
            "the Python of an environment that has it"
        )
    target = layout.folder() / "uv" / "uv"
    target.parent.mkdir(parents=True, exist_ok=True)
    real = Path(source).resolve()
    if not target.exists() or target.stat().st_size != real.stat().st_size:
        shutil.copy2(real, target)
        say(f"  uv from {real}")
    return target.parent


def uv_cache() -> Path:
    """uv's own cache of downloads, shared with the builds: torch comes over the network once."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uv"
    cache = Path(os.environ.get("UV_CACHE_DIR") or default).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    return cache
