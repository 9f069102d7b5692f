"""Up, down and the ways back from a crash."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import build, cgroups, images, lifecycle, processes, sandbox, steps
from localcluster.handle import ClusterHandle, local
from localcluster.layout import SLOTS, Layout, with_node
from localcluster.probes import Probes

pytestmark = pytest.mark.cluster


def output_of(*command: str) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {re.sub(r"^\d+: ", "", line) for line in done.stdout.splitlines()}


def traces(slot: int | None) -> set[str]:
    """What this machine holds that a cluster could have made; other slots' things left out."""
    found = output_of("ip", "-o", "link") | output_of("ip", "route", "show", "table", "all")
    found |= output_of("iptables-save") | output_of("ip6tables-save")
    found |= set(Path("/proc/self/mounts").read_text().splitlines())
    for folder in ("/run", "/run/netns", "/run/containerd", "/var/log", "/var/lib/kvscaler"):
        if Path(folder).is_dir():
            found |= {str(entry) for entry in Path(folder).iterdir()}
    found |= {str(folder) for folder in cgroups.ROOT.glob("*kvscaler*")}
    found |= {str(folder) for folder in cgroups.ROOT.glob("*/*kvscaler*")}
    others = [with_node("other", number, Path()) for number in range(SLOTS) if number != slot]
    names = "|".join(other.identity for other in others)
    states = "|".join(str(other.state) for other in others)
    ranges = "|".join(
        re.escape(str(other_range.network_address).removesuffix("0"))
        for other in others
        for other_range in (other.link, other.pod_range, other.service_range)
    )
    foreign = re.compile(rf"({names}|{states})\b|\b({ranges})")
    comments_and_counters = re.compile(r"^#|^:")
    return {
        line for line in found if not foreign.search(line) and not comments_and_counters.match(line)
    }


def members(layout: Layout) -> set[int]:
    """Process ids of everything that runs in the cluster, Pods included."""
    inside = set(processes.running(layout.state))
    for group in cgroups.groups(layout.identity):
        for file in group.rglob("cgroup.procs"):
            inside |= {int(pid) for pid in file.read_text().split()}
    return inside


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie waits for its parent, which is not ours


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A working tree of the test's own, whose cluster is down at the end whatever happens."""
    yield tmp_path
    lifecycle.down(tmp_path, "trial")


def test_down_leaves_nothing(tree: Path, probe_archive: Path) -> None:
    layout = lifecycle.up(tree, "trial")
    lifecycle.down(tree, "trial")
    before = traces(layout.slot)

    layout = lifecycle.up(tree, "trial")
    cluster = local(layout)
    cluster.import_image(probe_archive)
    Probes(cluster, "default").serve("greeter", "hello")
    inside = members(layout)
    during = traces(layout.slot)
    assert len(inside) > 10
    # Or the comparison below would be blind.
    assert {"mount", "route", "group"} <= {
        kind
        for kind, sample in {
            "mount": str(layout.network_namespace),
            "route": str(layout.pod_range),
            "group": f"{cgroups.ROOT}/memory/{layout.identity}",
        }.items()
        if any(sample in line for line in during - before)
    }

    lifecycle.down(tree, "trial")
    # What others do on this machine meanwhile passes; what a cluster left would stay.
    left: set[str] = set()

    def nothing_left() -> bool:
        left.clear()
        left.update(traces(layout.slot) - before)
        return not left

    with contextlib.suppress(steps.ClusterError):
        steps.wait_until(nothing_left, "nothing is left", 15)
    assert left == set()
    assert [pid for pid in inside if alive(pid)] == []
    assert not layout.state.exists()
    assert not layout.kubeconfig.exists()
    lifecycle.down(tree, "trial")  # a second time is fine


def test_up_repairs_what_was_killed_and_else_changes_nothing(
    tree: Path, probe_archive: Path
) -> None:
    layout = lifecycle.up(tree, "trial")
    cluster = local(layout)
    cluster.import_image(probe_archive)
    probe = Probes(cluster, "default")
    probe.serve("greeter", "hello")
    before = processes.running(layout.state)
    assert lifecycle.up(tree, "trial") == layout
    assert processes.running(layout.state).items() >= before.items()

    assert lifecycle.up(tree, "trial", audit=True) == layout
    cluster.kubectl("create", "configmap", "written")
    writes = [json.loads(line) for line in (layout.logs / "audit.log").read_text().splitlines()]
    assert ("create", "configmaps", "written") in {
        (write["verb"], write["objectRef"]["resource"], write["objectRef"].get("name"))
        for write in writes
    }
    assert not {"get", "list", "watch"} & {write["verb"] for write in writes}

    for number, victims in enumerate(
        (("kube-apiserver",), ("kubelet", "kube-proxy", "kube-scheduler"), ("etcd", "containerd"))
    ):
        by_name = {path.name: path for path in processes.running(layout.state).values()}
        for victim in victims:
            processes.end(layout.state, by_name[victim], signal.SIGKILL)

        assert lifecycle.up(tree, "trial") == layout
        assert lifecycle.is_healthy(layout)
        status = cluster.get("pod", "greeter")["status"]
        assert (status["phase"], status["containerStatuses"][0]["restartCount"]) == ("Running", 0)
        ended, printed = probe.run(f"caller-{number}", "get", "http://greeter/")
        assert (ended["exitCode"], printed) == (0, "200 hello")


def test_a_fresh_start_after_a_crash_keeps_images_until_wiped(
    tree: Path, probe_archive: Path
) -> None:
    layout = lifecycle.up(tree, "trial")
    cluster = local(layout)
    cluster.import_image(probe_archive)
    Probes(cluster, "default").serve("greeter", "hello")
    init = sandbox.first_process(layout)
    assert init is not None
    os.kill(init, signal.SIGKILL)

    again = local(lifecycle.up(tree, "trial"))
    assert again.get("pods", "--namespace", "default")["items"] == []
    assert again.layout is not None
    # The images are still there, without another import; the old containers are not.
    assert images.system_image("probe") in images.present(again.layout)
    containers = images.ctr(again.layout, "containers", "ls", "-q").split()
    assert len(containers) == 2, "CoreDNS and its pause container"

    lifecycle.down(tree, "trial", wipe=True)
    assert not layout.image_store.exists()


def test_two_clusters_side_by_side(
    cluster_with_probe: ClusterHandle, second_cluster: ClusterHandle, probe_archive: Path
) -> None:
    second_cluster.import_image(probe_archive)
    with cluster_with_probe.namespace() as namespace:
        first = Probes(cluster_with_probe, namespace)
        second_cluster.kubectl("create", "namespace", namespace)
        second = Probes(second_cluster, namespace)
        first.serve("greeter", "from the first")
        second.serve("greeter", "from the second")

        assert first.run("caller", "get", "http://greeter/")[1] == "200 from the first"
        assert second.run("caller", "get", "http://greeter/")[1] == "200 from the second"

        # Neither reaches into the other.
        address = first.wait("greeter", lambda pod: True)["status"]["podIP"]
        ended, printed = second.run("intruder", "dial", f"{address}:8080")
        assert ended["exitCode"] == 1
        assert "unreachable" in printed
    assert lifecycle.status().count(": healthy") >= 2


def test_pinned_versions_are_those_that_run(cluster: ClusterHandle) -> None:
    node = cluster.get("nodes")["items"][0]
    pinned = build.version(build.BINARIES["kubelet"])
    assert node["status"]["nodeInfo"]["kubeletVersion"] == pinned
    served = cluster.kubectl("version")
    assert f"Server Version: {pinned}" in served
