"""What this machine lacks is said in words: the thing, the cause and what to do."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import build, golang, packages, preflight, sandbox, steps
from localcluster.layout import SLOTS, with_node
from localcluster.steps import ClusterError


def test_a_node_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"needs root.*--only control-plane"):
        preflight.check()


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(preflight, "_kernel_faults", list)
    monkeypatch.setattr(preflight, "DISK_NEEDED_BYTES", 1 << 60)
    with pytest.raises(ClusterError, match=r"GiB free and a cluster needs 1073741824"):
        preflight.check()


def test_missing_packages_without_apt_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_find", lambda command: None)
    monkeypatch.setattr(packages, "NETWORK_PLUGIN_FOLDERS", ())
    with pytest.raises(ClusterError, match=r"containerd, containernetworking-plugins, .*runc"):
        packages.ensure()


@pytest.fixture
def overlay_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on an overlay, as in a container."""
    folders = [tmp_path / name for name in ("lower", "upper", "work", "merged")]
    for folder in folders:
        folder.mkdir()
    lower, upper, work, merged = folders
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], check=True)
    yield merged
    subprocess.run(["umount", merged], check=True)


@pytest.mark.cluster
def test_a_cache_folder_that_can_hold_no_overlay_is_named(
    overlay_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCALER_CACHE_DIR", str(overlay_folder))
    with pytest.raises(ClusterError, match=r"overlayfs can't be mounted on .*KVSCALER_CACHE_DIR"):
        preflight.check()
    monkeypatch.undo()
    preflight.check()


@pytest.mark.cluster
def test_a_slot_whose_addresses_are_routed_elsewhere_is_not_used() -> None:
    layout = with_node("clash", SLOTS - 1, Path("/nowhere"))
    assert sandbox.range_in_use(layout) is None
    part_of_it = str(next(layout.pod_range.subnets(new_prefix=20)))
    subprocess.run(["ip", "route", "add", "blackhole", part_of_it], check=True)
    try:
        assert part_of_it in str(sandbox.range_in_use(layout))
    finally:
        subprocess.run(["ip", "route", "del", "blackhole", part_of_it], check=True)


def test_an_unknown_binary_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ClusterError, match=r"no binary called 'kubeadm'.*kubelet"):
        build.ensure("kubeadm")


def test_versions_come_from_the_modules() -> None:
    assert build.version(build.BINARIES["kubelet"]).startswith("v1.36.")
    assert build.path("etcd").parts[-2] == f"etcd-{build.version(build.BINARIES['etcd'])}"
    for binary in build.BINARIES.values():
        assert build.version(binary)


def test_a_build_that_fails_says_why_and_leaves_no_binary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "go.mod").write_text("module broken\n\ngo 1.26.0\n")
    (folder / "main.go").write_text("package main\n\nfunc main() { undefined() }\n")
    monkeypatch.setattr(build, "COMPONENTS_DIR", tmp_path)
    monkeypatch.setenv("KVSCALER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(build.BINARIES, "broken", build.Binary("broken", "broken", "."))
    with pytest.raises(ClusterError, match="undefined: undefined"):
        build.ensure("broken")
    assert not build.path("broken").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("go version go1.26.8 linux/amd64", (1, 26, 8)), ("go1.22rc1", (1, 22)), ("devel", ())],
)
def test_go_versions(text: str, expected: tuple[int, ...]) -> None:
    assert golang.parse_version(text) == expected


def test_the_stricter_of_go_and_toolchain_counts(tmp_path: Path) -> None:
    go_mod = tmp_path / "go.mod"
    go_mod.write_text("module m\n\ngo 1.25.0\n\ntoolchain go1.26.3\n\nrequire a v1.99.0\n")
    assert golang.required_version(go_mod) == (1, 26, 3)


def test_waiting_ends_with_what_was_waited_for() -> None:
    with pytest.raises(ClusterError, match="the moon is blue: not so after 0 s"):
        steps.wait_until(lambda: False, "the moon is blue", 0)
