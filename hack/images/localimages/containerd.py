"""Giving images to a containerd: only the layers that it lacks travel."""

import subprocess
from pathlib import Path

from localcluster.steps import ClusterError, say, step

from localimages import layout, tools
from localimages.store import StoredImage

SHARED_BLOB_BYTES = 32 << 20
NAMESPACE = "k8s.io"  # the one that the kubelet's images live in


def require_socket(socket: Path) -> None:
    """Raises ClusterError when nothing can listen at `socket` (`ctr` would wait ten seconds)."""
    if not socket.is_socket():
        raise ClusterError(f"{socket}: no containerd listens there; is the cluster up?")


def _ctr(socket: Path, *arguments: str) -> list[str]:
    command = ["ctr", "--address", str(socket), "--namespace", NAMESPACE, *arguments]
    return tools.run(command).splitlines()


def import_images(socket: Path, references: list[str], root: Path | None = None) -> None:
    """Make each image present and unpacked; images of ours that nothing needs are removed.

    `root` is that containerd's own folder, if it is ours: large blobs are then shared with the
    image store instead of taking their space twice.

    Raises:
        ClusterError: an image is not in the store, or containerd refused it.
    """
    require_socket(socket)
    with layout.reading_store():
        images = [layout.store().image(reference) for reference in references]
        for image in images:
            _import(socket, image)
            if root is not None:
                share_large_blobs(root, image)
        _collect(socket, set(references))


def share_large_blobs(root: Path, image: StoredImage) -> int:
    """Make containerd's copies of large blobs links to the store's files; how many were made so.

    Both are named by the digest of their content and are never written again. On different disks
    the copies stay.
    """
    blobs = root / "io.containerd.content.v1.content" / "blobs" / "sha256"
    shared = 0
    for blob in image.blobs:
        theirs, ours = blobs / blob.hex, layout.store().blob_path(blob.digest)
        if blob.size_bytes < SHARED_BLOB_BYTES or not theirs.is_file() or theirs.samefile(ours):
            continue
        if theirs.stat().st_dev != ours.stat().st_dev:
            continue
        link = root / f"link-{blob.hex}"
        link.unlink(missing_ok=True)
        link.hardlink_to(ours)
        link.rename(theirs)
        shared += 1
    return shared


def _import(socket: Path, image: StoredImage) -> None:
    if image.reference in _ctr(socket, "images", "ls", "--quiet"):
        say(f"    0.0 s  {image.reference}: already imported")
        return
    have = set(_ctr(socket, "content", "ls", "--quiet"))
    lacking_bytes = sum(blob.size_bytes for blob in image.blobs if blob.digest not in have)
    # Its content store and the unpacked files both stay.
    layout.require_free_disk(2 * lacking_bytes + (1 << 30), f"importing {image.reference}")
    with step(f"import {image.reference} ({lacking_bytes / 1e6:.1f} MB travel)"):
        command = ["ctr", "--address", str(socket), "--namespace", NAMESPACE]
        with subprocess.Popen(
            [*command, "images", "import", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            broken: OSError | None = None
            try:
                layout.store().write_archive(image, have, process.stdin)
                process.stdin.close()
            except BrokenPipeError as error:
                broken = error  # ctr ended early: its own words say why
            words = process.stdout.read().decode(errors="replace").strip()
        if process.returncode != 0 or broken is not None:
            raise ClusterError(f"ctr images import of {image.reference} failed: {words}")
    if image.reference not in _ctr(socket, "images", "ls", "--quiet"):
        raise ClusterError(f"{image.reference}: imported without an error but not there: {words}")


def _collect(socket: Path, wanted: set[str]) -> None:
    """Keep what a container uses, the tags in the store and `wanted`; remove our other images.

    The kubelet's side knows each image by a second name, `sha256:ID`, which would hold its layers:
    all names of the same content go together.
    """
    digests: dict[str, str] = {}
    for line in _ctr(socket, "images", "ls")[1:]:
        name, _, digest = line.split()[:3]
        digests[name] = digest
    keep = set(layout.store().references()) | wanted
    keep |= set(" ".join(_ctr(socket, "containers", "ls")).split())
    kept_digests = {digest for name, digest in digests.items() if name in keep}
    repositories = tuple(f"{layout.image_repository(image)}:" for image in layout.IMAGES)
    for tag in (name for name in digests if name.startswith(repositories)):
        if digests[tag] not in kept_digests:
            names = [name for name, digest in digests.items() if digest == digests[tag]]
            _ctr(socket, "images", "rm", *names)
            say(f"           removed {tag}: not in the store any more and used by no container")
