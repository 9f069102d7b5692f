"""Up, down and status: the order of things, each step idempotent."""

import json
import shutil
import signal
import time
from pathlib import Path

from localcluster import (
    build,
    cgroups,
    dns,
    images,
    node,
    packages,
    preflight,
    processes,
    sandbox,
    slots,
)
from localcluster.api import Api
from localcluster.control_plane import (
    ControlPlane,
    is_audited,
    publish_kubeconfig,
    write_audit_policy,
)
from localcluster.layout import Layout, kubeconfig_path
from localcluster.node import Node
from localcluster.steps import ClusterError, say, step

COMPONENTS = (*build.CONTROL_PLANE_BINARIES, "kubelet", "kube-proxy")


def up(tree: Path, name: str, audit: bool = False) -> Layout:
    """Bring the cluster up: a no-op when it is, a repair when parts of it have died.

    `audit` has the API server log every write, from now until the cluster goes.
    """
    started = time.monotonic()
    preflight.require_root()
    packages.ensure()
    preflight.check()
    build.ensure(*build.NODE_BINARIES)
    with slots.machine_lock():
        layout = slots.find(kubeconfig_path(tree, name))
        if layout is not None and audit and not is_audited(layout):
            write_audit_policy(layout)
            # The repair below starts it again; asked kindly, it would wait for its watchers.
            processes.end(layout.state, build.path("kube-apiserver"), signal.SIGKILL)
        if layout is not None and is_healthy(layout):
            if not layout.kubeconfig.exists():
                publish_kubeconfig(layout)
            say(f"Cluster {name!r} is up already (kubeconfig: {layout.kubeconfig})")
            return layout
        if layout is not None and (
            sandbox.first_process(layout) is None or not slots.is_current(layout)
        ):
            say(f"Cluster {name!r} has crashed or is of other versions: starting afresh")
            _remove(layout)
            layout = None
        if layout is None:
            layout = slots.take(name, kubeconfig_path(tree, name))
            with step(f"sandbox {layout.identity}: namespaces, link, routes"):
                sandbox.create(layout)
            if audit:
                write_audit_policy(layout)
        else:
            say(f"Cluster {name!r} has lost a component: starting what is missing")
        _start(layout)
    say(f"Cluster {name!r} is up after {time.monotonic() - started:.1f} s")
    say(f"  kubeconfig: {layout.kubeconfig}  context: {layout.context}")
    return layout


def _start(layout: Layout) -> None:
    the_node = Node(layout)
    the_node.start_containerd()
    ControlPlane(layout, sandbox.enter(layout)).start()
    api = Api(layout.server, layout.pki)
    dns.apply(layout, api)
    the_node.start_agents(api)
    dns.wait_ready(api)


def down(tree: Path, name: str, wipe: bool = False) -> None:
    """Stop the cluster and remove all that it made. `wipe` also removes its image store."""
    preflight.require_root()
    with slots.machine_lock():
        layout = slots.find(kubeconfig_path(tree, name))
        if layout is None:
            say(f"Cluster {name!r} is not up")
            return
        with step(f"cluster {name!r} down"):
            _remove(layout)
        if wipe:
            with step(f"image store {layout.image_store} removed"):
                shutil.rmtree(layout.image_store, ignore_errors=True)


def down_all() -> None:
    """Stop every cluster with a node on this machine, whichever working tree it belongs to."""
    preflight.require_root()
    with slots.machine_lock():
        for layout in slots.taken():
            with step(f"cluster {layout.name!r} of {layout.kubeconfig} down"):
                _remove(layout)


def _remove(layout: Layout) -> None:
    sandbox.destroy(layout)
    cgroups.remove(layout.identity)
    slots.release(layout)
    layout.kubeconfig.unlink(missing_ok=True)


def is_healthy(layout: Layout) -> bool:
    """Everything runs, from the versions pinned now, and node and DNS are ready."""
    if sandbox.first_process(layout) is None or not slots.is_current(layout):
        return False
    alive = set(processes.running(layout.state).values())
    wanted = [build.path(name).resolve() for name in COMPONENTS]
    if not {*wanted, packages.tool("containerd")} <= alive:
        return False
    api = Api(layout.server, layout.pki)
    if not api.ready() or not node.is_ready(layout, api):
        return False
    deployment = api.get(dns.DEPLOYMENT)
    return deployment is not None and dns.is_rolled_out(deployment)


def is_up(tree: Path, name: str) -> bool:
    """Whether the cluster's sandbox lives, be it in full health or not."""
    layout = slots.find(kubeconfig_path(tree, name))
    return layout is not None and sandbox.first_process(layout) is not None


def find_running(tree: Path, name: str) -> Layout:
    """The cluster's layout. Raises ClusterError when it is not up."""
    layout = slots.find(kubeconfig_path(tree, name))
    if layout is None or sandbox.first_process(layout) is None:
        raise ClusterError(f"cluster {name!r} is not up: run hack/cluster/up")
    return layout


def status() -> str:
    """The clusters of this machine in words, with health and images."""
    lines = []
    for layout in slots.taken():
        health = "healthy" if is_healthy(layout) else "NOT healthy"
        lines.append(f"{layout.name}: {health}")
        lines.append(f"  kubeconfig {layout.kubeconfig}, context {layout.context}")
        lines.append(f"  node {layout.node_address}, Pods {layout.pod_range}, ")
        lines[-1] += f"Services {layout.service_range}, logs {layout.logs}"
        alive = set(processes.running(layout.state).values())
        dead = [name for name in COMPONENTS if build.path(name).resolve() not in alive]
        lines += [f"  not running: {', '.join(dead)}"] if dead else []
        if packages.tool("containerd") in alive:
            lines += [f"  image {name}" for name in sorted(images.present(layout)) if ":" in name]
    return "\n".join(lines) or "no cluster runs on this machine"


def describe(layout: Layout) -> str:
    """What scripts need of a running cluster, as one JSON object."""
    facts = {
        "name": layout.name,
        "context": layout.context,
        "kubeconfig": str(layout.kubeconfig),
        "state": str(layout.state),
        "networkNamespace": str(layout.network_namespace),
        "containerdSocket": str(layout.containerd_socket),
        "nodeAddress": str(layout.node_address),
        "podRange": str(layout.pod_range),
        "serviceRange": str(layout.service_range),
        "images": sorted(name for name in images.present(layout) if ":" in name),
    }
    return json.dumps(facts, indent=1)
