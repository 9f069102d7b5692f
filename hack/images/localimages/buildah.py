"""Buildah with its own storage in the cache folder: no daemon, no registry, nothing of the user's.

File and creation times are fixed, so that equal content gives an equal image and an equal digest.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localimages import layout, tools
from localimages.store import Blob

CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
IGNORE_FILE = layout.TREE / "hack" / "images" / "containerignore"


@dataclass(frozen=True)
class BuiltImage:
    """What buildah knows of an image: its id and its layers from the base up, uncompressed."""

    image_id: str
    layers: tuple[Blob, ...]

    @property
    def unpacked_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)


def _buildah(*arguments: str, watch: bool = False) -> str:
    storage = ["--root", str(layout.folder() / "storage"), "--storage-driver", "overlay"]
    runtime = ["--runroot", str(layout.folder() / "run")]
    return tools.run(["buildah", *storage, *runtime, *arguments], watch=watch)


def exists(reference: str) -> bool:
    return any(reference in image["names"] for image in _images())


def _images() -> list[dict[str, Any]]:
    images: list[dict[str, Any]] = json.loads(_buildah("images", "--json") or "null") or []
    return [{**image, "names": image.get("names") or []} for image in images]


def build(
    recipe: Path,
    context: Path,
    reference: str,
    *,
    base: str | None = None,
    target: str | None = None,
) -> BuiltImage:
    """Build a Containerfile (or one stage of it) as `reference`; unchanged steps are reused.

    Builds see this machine's certificates and uv's cache; a build whose dependency layers exist
    uses no network.
    """
    arguments = ["bud", "--isolation", "chroot", "--layers", "--timestamp", "0", "--format", "oci"]
    arguments += ["--force-rm", "--pull-never", "--ignorefile", str(IGNORE_FILE)]
    arguments += ["--build-context", f"uv={tools.uv_folder()}"]
    arguments += ["--volume", f"{tools.uv_cache()}:/root/.cache/uv"]
    if CA_BUNDLE.exists():
        arguments += ["--volume", f"{CA_BUNDLE}:{CA_BUNDLE}:ro"]
    if base is not None:
        arguments += ["--build-arg", f"BASE={base}"]
    if target is not None:
        arguments += ["--target", target]
    _buildah(*arguments, "--tag", reference, "--file", str(recipe), str(context))
    return inspect(reference)


def inspect(reference: str) -> BuiltImage:
    facts = json.loads(_buildah("inspect", "--type", "image", reference))
    manifest = json.loads(facts["Manifest"])
    layers = tuple(Blob(layer["digest"], layer["size"]) for layer in manifest["layers"])
    return BuiltImage(facts["FromImageID"], layers)


def tag(reference: str, other: str) -> None:
    _buildah("tag", reference, other)


def export_plain(reference: str, folder: Path) -> None:
    """Write every layer of an image as an uncompressed tar file named by its digest."""
    shutil.rmtree(folder, ignore_errors=True)
    _buildah("push", "--quiet", "-D", "--format", "oci", reference, f"dir:{folder}")


def export(reference: str) -> None:
    """Add an image to the store; layers that are there already are not written again."""
    store = layout.store()
    _buildah("push", "--quiet", "--format", "oci", reference, f"oci:{store.folder}:{reference}")


def keep(references: set[str]) -> None:
    """Remove every name but these, then what no name needs; reused steps need a name to stay."""
    for image in _images():
        for name in image["names"]:
            if name not in references:
                _buildah("rmi", name)
    _buildah("rm", "--all")  # what an interrupted build left; nobody else uses this storage
    _buildah("rmi", "--prune")
