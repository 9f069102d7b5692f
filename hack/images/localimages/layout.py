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
def building() -> Iterator[None]:
    """One build at a time: they share buildah's storage and clean up after each other."""
    with _lock("build.lock", fcntl.LOCK_EX, "another build of images"):
        yield


@contextmanager
def reading_store() -> Iterator[None]:
    """While images are read, builds may add to the store but not clean it."""
    with _lock("store.lock", fcntl.LOCK_SH, "the cleaning of the image store"):
        yield


@contextmanager
def cleaning_store() -> Iterator[bool]:
    """Whether the store may be cleaned now; not while an import reads it, the next build will."""
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / "store.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def _lock(name: str, kind: int, holder: str) -> Iterator[None]:
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / name).open("w") as lock:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"  waiting for {holder} to end")
            fcntl.flock(lock, kind)
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
