"""Build the cluster's binaries from their published Go modules, pinned by go.mod and go.sum.

Only what is asked for is built, once: a binary lives in the cache folder at
`bin/<component>-<version>/<binary>` and is never built again for that version.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from localcluster import golang
from localcluster.steps import ClusterError, cache_dir, say, step

COMPONENTS_DIR = Path(__file__).parent.parent / "components"
DISK_NEEDED_BYTES = 8 << 30  # module cache, build cache and binaries of a cold build
# Identical flags in every build: Go's cache is keyed by them, so a difference compiles all anew.
BUILD_ENVIRONMENT = {
    "CGO_ENABLED": "0",
    "GOTOOLCHAIN": "local",
    "GOFLAGS": "-mod=readonly -buildvcs=false",
}


@dataclass(frozen=True)
class Binary:
    """One executable: the component (a folder with a go.mod) and the package that it is made of."""

    name: str
    component: str
    package: str
    module: str = ""  # whose version names the build; empty: our own main, named by its source
    tags: str = ""


def _kubernetes(name: str) -> Binary:
    return Binary(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", "k8s.io/kubernetes")


BINARIES = {
    binary.name: binary
    for binary in (
        _kubernetes("kube-apiserver"),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        _kubernetes("kubelet"),
        _kubernetes("kube-proxy"),
        _kubernetes("kubectl"),
        Binary("etcd", "etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"),
        Binary("coredns", "coredns", ".", "github.com/coredns/coredns"),
        Binary("pause", "pause", "."),
        Binary("probe", "probe", "."),
        Binary("helm", "helm", "helm.sh/helm/v3/cmd/helm", "helm.sh/helm/v3"),
        Binary("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", "sigs.k8s.io/kwok"),
        Binary(
            "prometheus",
            "prometheus",
            "github.com/prometheus/prometheus/cmd/prometheus",
            "github.com/prometheus/prometheus",
            tags="remove_all_sd,enable_kubernetes_sd",
        ),
    )
}
API_BINARIES = ("etcd", "kube-apiserver")
CONTROL_PLANE_BINARIES = (*API_BINARIES, "kube-controller-manager", "kube-scheduler")
NODE_BINARIES = (*CONTROL_PLANE_BINARIES, "kubelet", "kube-proxy", "kubectl", "coredns", "pause")


def version(binary: Binary) -> str:
    """The pinned version of the binary's module; with our own main.go, also its digest."""
    folder = COMPONENTS_DIR / binary.component
    digest = ""
    if binary.package == ".":
        digest = hashlib.sha256((folder / "main.go").read_bytes()).hexdigest()[:8]
    if not binary.module:
        return digest
    pinned = re.search(
        rf"^(?:require)?\s*{re.escape(binary.module)} (v\S+)",
        (folder / "go.mod").read_text(),
        flags=re.MULTILINE,
    )
    if pinned is None:
        raise ClusterError(f"{folder / 'go.mod'} does not require {binary.module}")
    return f"{pinned.group(1)}-{digest}" if digest else pinned.group(1)


def path(name: str) -> Path:
    """Where the binary lies, whether or not it has been built. Raises ClusterError if unknown."""
    binary = BINARIES.get(name)
    if binary is None:
        raise ClusterError(f"no binary called {name!r}; there are: {', '.join(BINARIES)}")
    return cache_dir() / "bin" / f"{binary.component}-{version(binary)}" / name


def ensure(*names: str) -> None:
    """Build those of `names` that are missing, one at a time, in the order given."""
    missing = [name for name in names if not path(name).exists()]
    if not missing:
        return
    bin_dir = cache_dir() / "bin"
    bin_dir.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(bin_dir).free
    if free_bytes < DISK_NEEDED_BYTES:
        raise ClusterError(
            f"{bin_dir} has {free_bytes / 2**30:.1f} GiB free and a first build needs "
            f"{DISK_NEEDED_BYTES / 2**30:.0f}: free some, or set KVSCALER_CACHE_DIR to a larger disk"
        )
    with (bin_dir / ".lock").open("w") as lock:  # two builds at once would only share the cores
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name in missing if not path(name).exists()]
        if missing:
            say(f"Building {', '.join(missing)} from source (once; kept in {bin_dir})")
        for name in missing:
            _build(BINARIES[name])


def _build(binary: Binary) -> None:
    folder = COMPONENTS_DIR / binary.component
    target = path(binary.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    go = golang.find_go(golang.required_version(folder / "go.mod"))
    tags = ["-tags", binary.tags] if binary.tags else []
    command: list[str | Path] = [go, "build", "-trimpath", *tags, "-ldflags", _linker_flags(binary)]
    with step(f"build {binary.name} {version(binary)}"):
        done = subprocess.run(
            [*command, "-o", partial, binary.package],
            cwd=folder,
            env={**os.environ, **BUILD_ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last_lines = "\n".join(done.stdout.splitlines()[-20:])
            raise ClusterError(f"go build of {binary.name} in {folder} failed:\n{last_lines}")
        partial.rename(target)


def _linker_flags(binary: Binary) -> str:
    flags = "-s -w"
    if binary.component == "kubernetes":  # unstamped, they would report v0.0.0-master
        release = version(binary)
        major, minor = release.removeprefix("v").split(".")[:2]
        stamp = "-X k8s.io/component-base/version."
        flags += f" {stamp}gitVersion={release} {stamp}gitMajor={major} {stamp}gitMinor={minor}"
    return flags
