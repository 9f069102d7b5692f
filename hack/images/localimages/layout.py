"""Where the images and their parts are kept outside the tree, and what they are called."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localcluster.steps import ClusterError, cache_dir, say

from localimages.store import ImageStore

TREE = Path(__file__).resolve().parents[3]
REPOSITORY = "docker.io/local"
IMAGES = ("operator", "sidecar")
ENVIRONMENT_FILE = TREE / "build" / "images.env"


def image_repository(image: str) -> str:
    """Name of an image without its tag."""
    return f"{REPOSITORY}/kvscaler-{image}"


def folder() -> Path:
    """Everything of this package in the cache folder."""
    return cache_dir() / "images"


def store() -> ImageStore:
    return ImageStore(folder() / "oci")


def require_free_disk(needed_bytes: int, what: str) -> None:
    """Raises ClusterError when the disk of the cache folder can't take `what`."""
    folder().mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder()).free
    if free_bytes < needed_bytes:
        raise ClusterError(
            f"{folder()}: {what} needs {needed_bytes / 2**30:.1f} GiB free and there are "
            f"{free_bytes / 2**30:.1f}; make room, or set KVSCALER_CACHE_DIR to another disk"
        )


@contextmanager
def exclusive() -> Iterator[None]:
    """One build or import at a time: they share buildah's storage and clean up after each other."""
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("  waiting for another build or import of images to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_environment() -> dict[str, str]:
    """The images of the last build by name (`operator`, `sidecar`), as `build/images.env` says.

    Raises:
        ClusterError: nothing was built from this tree yet.
    """
    if not ENVIRONMENT_FILE.exists():
        raise ClusterError(f"{ENVIRONMENT_FILE} is not there: run hack/images/build")
    lines = ENVIRONMENT_FILE.read_text(encoding="utf-8").split()
    values = dict(line.split("=", 1) for line in lines)
    return {image: values[f"{image.upper()}_IMAGE"] for image in IMAGES}


def write_environment(references: dict[str, str]) -> None:
    """Record the images of this build for scripts: `OPERATOR_IMAGE=…` and `SIDECAR_IMAGE=…`."""
    ENVIRONMENT_FILE.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{image.upper()}_IMAGE={references[image]}\n" for image in IMAGES)
    scratch = ENVIRONMENT_FILE.with_suffix(".new")
    scratch.write_text(text, encoding="utf-8")
    scratch.rename(ENVIRONMENT_FILE)
