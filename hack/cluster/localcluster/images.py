"""The cluster's image store: what is in it, and how an archive gets in without a registry."""

import subprocess
from pathlib import Path

from localcluster import build, oci
from localcluster.layout import Layout
from localcluster.steps import ClusterError, step

COMMAND_TIMEOUT_SECONDS = 10
# By binary: the arguments that its container runs it with.
SYSTEM_IMAGES: dict[str, tuple[str, ...]] = {
    "pause": (),
    "coredns": ("-conf", "/etc/coredns/Corefile"),
}


def system_image(binary: str) -> str:
    """Reference of the image of one of our binaries; another version is another image."""
    return f"docker.io/local/{binary}:{build.version(build.BINARIES[binary])}"


def ctr(layout: Layout, *arguments: str, timeout_seconds: float | None = None) -> str:
    """Run containerd's client in the namespace that the kubelet uses; its output."""
    command = ["ctr", "--address", str(layout.containerd_socket), "--namespace", "k8s.io"]
    try:
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"containerd did not answer 'ctr {' '.join(arguments)}'") from error
    if done.returncode != 0:
        raise ClusterError(f"ctr {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def present(layout: Layout) -> set[str]:
    """References of the images in the store."""
    names = ctr(layout, "images", "ls", "-q", timeout_seconds=COMMAND_TIMEOUT_SECONDS)
    return set(names.split())


def import_archive(layout: Layout, archive: Path) -> list[str]:
    """Import an OCI or Docker archive and unpack it; the references that it brought."""
    if not archive.is_file():
        raise ClusterError(f"{archive}: no such file; give an OCI or Docker archive (a tar file)")
    with step(f"import {archive.name} ({archive.stat().st_size / 2**20:.1f} MiB)"):
        output = ctr(layout, "images", "import", str(archive))
    return [line.split()[1] for line in output.splitlines() if line.startswith("unpacking ")]


def ensure_system_images(layout: Layout) -> None:
    """Import the two images that a node needs before any Pod can run."""
    here = present(layout)
    for binary, arguments in SYSTEM_IMAGES.items():
        if system_image(binary) not in here:
            archive = layout.state / f"{binary}.tar"
            oci.write_archive(archive, system_image(binary), build.path(binary), arguments)
            import_archive(layout, archive)
            archive.unlink()
