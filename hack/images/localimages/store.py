"""The OCI layout in the cache folder: every image built here, its layers once, uncompressed if big.

It stands between buildah and containerd. Buildah alone would compress five gigabytes at every
export; here the layers that rarely change are written once as plain tar files, buildah finds them
by digest at each later export, and only a new application layer is made. An archive for containerd
then holds only what that containerd lacks.
"""

import io
import json
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from localcluster.steps import POLL_SECONDS, ClusterError

REF_NAME = "org.opencontainers.image.ref.name"
INDEX_PATIENCE_SECONDS = 2
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Blob:
    """A content-addressed file: digest as `sha256:HEX` and size."""

    digest: str
    size_bytes: int

    @property
    def hex(self) -> str:
        return self.digest.removeprefix("sha256:")


@dataclass(frozen=True)
class StoredImage:
    """An image of the store: its full name, its manifest's entry and every blob that it needs."""

    reference: str
    entry: dict[str, Any]
    blobs: tuple[Blob, ...]  # manifest, configuration, then layers from the base up

    @property
    def lasting_layers(self) -> tuple[Blob, ...]:
        """All layers but the last, which holds the application."""
        return self.blobs[2:-1]


@dataclass(frozen=True)
class ImageStore:
    """An OCI image layout folder."""

    folder: Path

    def blob_path(self, digest: str) -> Path:
        return self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def has(self, digest: str) -> bool:
        return self.blob_path(digest).is_file()

    def take_in(self, export: Path) -> None:
        """Move the layer files of a `dir:` export of buildah in: same content, named by digest."""
        self.blob_path("x").parent.mkdir(parents=True, exist_ok=True)
        for file in export.iterdir():
            if len(file.name) == 64:
                file.rename(self.blob_path(file.name))

    def _index(self) -> dict[str, Any]:
        path = self.folder / "index.json"
        if not path.exists():
            return {"schemaVersion": 2, "manifests": []}
        deadline = time.monotonic() + INDEX_PATIENCE_SECONDS
        while True:
            try:
                index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:  # buildah rewrites it in place: someone's build may be doing so now
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)
            else:
                return index

    def references(self) -> list[str]:
        """Names of the images, the one added last at the end."""
        return [entry["annotations"][REF_NAME] for entry in self._index()["manifests"]]

    def image(self, reference: str) -> StoredImage:
        """Look an image up.

        Raises:
            ClusterError: it is not in the store, or one of its blobs is missing.
        """
        for entry in self._index()["manifests"]:
            if entry["annotations"][REF_NAME] == reference:
                return StoredImage(reference, entry, tuple(self._blobs(reference, entry)))
        raise ClusterError(f"{reference}: not in {self.folder}; run hack/images/build")

    def _blobs(self, reference: str, entry: dict[str, Any]) -> Iterator[Blob]:
        manifest_path = self.blob_path(entry["digest"])
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        yield Blob(entry["digest"], entry["size"])
        for part in (manifest["config"], *manifest["layers"]):
            if not self.has(part["digest"]):
                raise ClusterError(
                    f"{reference}: layer {part['digest']} is missing in {self.folder}; remove "
                    "that folder and run hack/images/build"
                )
            yield Blob(part["digest"], part["size"])

    def renew(self, reference: str) -> None:
        """Make an image the one added last, so that it is the last to be cleaned away."""
        index = self._index()
        index["manifests"].sort(key=lambda entry: entry["annotations"][REF_NAME] == reference)
        self._write_index(index)

    def _write_index(self, index: dict[str, Any]) -> None:
        scratch = self.folder / "index.json.new"
        scratch.write_text(json.dumps(index), encoding="utf-8")
        scratch.rename(self.folder / "index.json")

    def keep(self, references: list[str]) -> int:
        """Forget all other images and the blobs that nobody needs any more; bytes freed."""
        index = self._index()
        wanted = [e for e in index["manifests"] if e["annotations"][REF_NAME] in references]
        needed = {blob.hex for reference in references for blob in self.image(reference).blobs}
        if len(wanted) != len(index["manifests"]):
            self._write_index({**index, "manifests": wanted})
        freed_bytes = 0
        for path in (self.folder / "blobs" / "sha256").iterdir():
            if path.name not in needed:
                freed_bytes += path.stat().st_size
                path.unlink()
        return freed_bytes

    def write_archive(self, image: StoredImage, have: set[str], sink: IO[bytes]) -> list[Blob]:
        """Stream an OCI archive of `image` without the blobs in `have`; the blobs that it holds.

        The index names the image for containerd, which finds the rest in its own content store.
        """
        entry = dict(image.entry)
        entry["annotations"] = {"io.containerd.image.name": image.reference}
        sent = [blob for blob in image.blobs if blob.digest not in have]
        with tarfile.open(fileobj=sink, mode="w|", bufsize=_COPY_BYTES) as archive:
            _add_text(archive, "oci-layout", {"imageLayoutVersion": "1.0.0"})
            _add_text(archive, "index.json", {"schemaVersion": 2, "manifests": [entry]})
            for blob in sent:
                member = tarfile.TarInfo(f"blobs/sha256/{blob.hex}")
                member.size, member.mode = blob.size_bytes, 0o644
                with self.blob_path(blob.digest).open("rb") as content:
                    archive.addfile(member, content)
        return sent


def _add_text(archive: tarfile.TarFile, name: str, content: dict[str, Any]) -> None:
    text = json.dumps(content).encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(text), 0o644
    archive.addfile(member, io.BytesIO(text))
