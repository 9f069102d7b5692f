"""Nodes that only pretend, by kwok: many nodes and Pods for the price of one process.

Pods get there only when they tolerate the taint; what they do is in components/kwok/stages.yaml.
"""

from pathlib import Path

from localcluster import build, processes, sandbox
from localcluster.api import Api
from localcluster.layout import Layout
from localcluster.steps import ClusterError, step, wait_until

STAGES = build.COMPONENTS_DIR / "kwok" / "stages.yaml"
LABEL = "kvscaler.io/fake-node"
MOST_NODES = 250  # each gets a /24 of the Pod range, a /16, as does the real node
READY_TIMEOUT_SECONDS = 120


def set_nodes(layout: Layout, count: int, attached: bool = False) -> None:
    """Have exactly `count` fake nodes, all Ready; with none, kwok ends too.

    `attached`: kwok ends with this process, even with one that is killed.
    """
    if not 0 <= count <= MOST_NODES:
        raise ClusterError(f"{count} fake nodes: there can be 0 to {MOST_NODES}")
    api = Api(layout.server, layout.pki)
    build.ensure("kwok")
    if count:
        _start_kwok(layout, attached)
    with step(f"{count} fake nodes"):
        wanted = {f"fake-{number}" for number in range(count)}
        for name in _nodes(api).keys() - wanted:
            api.delete(f"/api/v1/nodes/{name}")
        for name in sorted(wanted):
            api.apply("/api/v1/nodes", _node(name))
        wait_until(
            lambda: _nodes(api) == dict.fromkeys(wanted, True),
            f"{count} fake nodes are Ready",
            READY_TIMEOUT_SECONDS,
        )
    if not count:
        processes.end(layout.state, build.path("kwok"))


def _start_kwok(layout: Layout, attached: bool) -> None:
    kwok = build.path("kwok")
    if processes.find(layout.state, kwok) is not None:
        return
    command: list[str | Path] = [
        kwok,
        f"--config={STAGES}",
        f"--kubeconfig={layout.pki / 'kwok.kubeconfig'}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-label-selector={LABEL}=true",
        "--node-lease-duration-seconds=40",
        f"--node-ip={layout.link.network_address}",  # an address that nobody has
        f"--cidr={layout.pod_range}",  # for a Pod whose node has no range of its own yet
    ]
    enter = () if layout.slot is None else sandbox.enter(layout)
    # It looks for a configuration of the user's in HOME; there shall be none.
    home = {"HOME": str(layout.state)}
    log = layout.logs / "kwok.log"
    processes.start(layout.state, command, log, enter, home, attached)


def _nodes(api: Api) -> dict[str, bool]:
    """The fake nodes that there are, and whether each is Ready."""
    listed = api.get(f"/api/v1/nodes?labelSelector={LABEL}%3Dtrue")
    if listed is None:
        raise ClusterError("the API server does not list nodes: see hack/cluster/status")
    return {
        node["metadata"]["name"]: any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in node["status"].get("conditions", [])
        )
        for node in listed["items"]
    }


def _node(name: str) -> dict[str, object]:
    labels = {LABEL: "true", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    taint = {"key": LABEL, "value": "true", "effect": "NoSchedule"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [taint]},
    }
