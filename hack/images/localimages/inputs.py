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

APPLICATION_STAGE = "\nFROM ${BASE} AS app\n"


def key(recipe: Path, base_reference: str) -> str:
    """Hash of all inputs of a Containerfile built on `base_reference`."""
    return _key(recipe.read_text(encoding="utf-8"), base_reference)


def lasting_key(recipe: Path, base_reference: str) -> str:
    """Hash of the inputs of all stages before the application's."""
    lasting, found, _ = recipe.read_text(encoding="utf-8").partition(APPLICATION_STAGE)
    if not found:
        raise ClusterError(f"{recipe}: has no line {APPLICATION_STAGE.strip()!r}")
    return _key(lasting, base_reference)


def _key(recipe: str, base_reference: str) -> str:
    digest = hashlib.sha256(f"{base_reference}\0{recipe}".encode())
    for path in copied_files(recipe):
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

    def remember(self, made: dict[str, str], kept: list[str]) -> None:
        """Record a build's keys; images that are not kept any more are forgotten."""
        self._references |= made
        alive = {*kept, *made.values()}
        self._references = {k: ref for k, ref in self._references.items() if ref in alive}
        scratch = self._path.with_suffix(".new")
        scratch.write_text(json.dumps(self._references, indent=1), encoding="utf-8")
        scratch.rename(self._path)
