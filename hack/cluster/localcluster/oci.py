"""Container images from a single static binary: an OCI archive of one layer, with no builder."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def architecture() -> str:
    return ARCHITECTURES.get(platform.machine(), platform.machine())


def write_archive(target: Path, reference: str, binary: Path, arguments: tuple[str, ...]) -> None:
    """Write to `target` an archive of the image `reference` that runs `/NAME arguments` as 65532.

    The layer holds only the binary; same input, same bytes.
    """
    layer = _tar({binary.name: (binary.read_bytes(), 0o755)})
    config = _json(
        {
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "Entrypoint": [f"/{binary.name}"],
                "Cmd": list(arguments),
                "User": "65532:65532",
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
        }
    )
    entry = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": reference}
    blobs = {_blob_path(blob): (blob, 0o644) for blob in (layer, config, manifest)}
    archive = {
        "oci-layout": (_json({"imageLayoutVersion": "1.0.0"}), 0o644),
        "index.json": (_json({"schemaVersion": 2, "manifests": [entry]}), 0o644),
        **blobs,
    }
    target.write_bytes(_tar(archive))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _blob_path(blob: bytes) -> str:
    return f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}"


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, (content, mode) in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = mode
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
