"""What an image is made from, as one hash: equal inputs need no build at all.

The hash covers the Containerfile, the base and every file that the Containerfile copies from the
tree. The pins in `requirements/` carry hashes of the packages, so they stand for those.
"""

import hashlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from localcluster.steps import ClusterError

from localimages import layout


def key(recipe: Path, base_reference: str) -> str:
    """Hash of all inputs of a Containerfile built on `base_reference`."""
    digest = hashlib.sha256(base_reference.encode())
    digest.update(recipe.read_bytes())
    for path in copied_files(recipe.read_text(encoding="utf-8")):
        digest.update(
            f"\0{path.relative_to(layout.TREE)}\0{path.stat().st_mode & 0o111}\0".encode()
        )
        digest.update(path.read_bytes())
    return digest.hexdigest()


def copied_files(recipe: str) -> Iterator[Path]:
    """Every file of the tree that a COPY line takes, sorted, as the ignore file leaves them."""
    sources = {
        source
        for line in recipe.replace("\\\n", " ").splitlines()
        if line.startswith("COPY ") and "--from=" not in line
        for source in shlex.split(line)[1:-1]
    }
    for source in sorted(sources):
        path = layout.TREE / source
        if not path.exists():
            raise ClusterError(f"{path}: a Containerfile copies it, but it is not in the tree")
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in found if file.is_file() and file.parent.name != "__pycache__")


class Memory:
    """Which image the inputs of a key gave last time; lost, it costs a rebuild and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._references: dict[str, str] = {}
        if path.exists():
            self._references = json.loads(path.read_text(encoding="utf-8"))

    def recall(self, input_key: str) -> str | None:
        return self._references.get(input_key)

    def remember(self, input_key: str, reference: str, kept: list[str]) -> None:
        """Record a build; images that are not kept any more are forgotten."""
        self._references[input_key] = reference
        alive = {*kept, reference}
        self._references = {k: ref for k, ref in self._references.items() if ref in alive}
        scratch = self._path.with_suffix(".new")
        scratch.write_text(json.dumps(self._references, indent=1), encoding="utf-8")
        scratch.rename(self._path)
