"""A control plane alone, for work on the API: no node, no root, nothing but processes on loopback.

It lives in a folder given by the caller, on ports that were free when it started.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localcluster import build, processes
from localcluster.control_plane import ControlPlane, write_audit_policy
from localcluster.layout import Layout, Ports, kubeconfig_path
from localcluster.steps import cache_dir, say

RECORD = "control-plane.json"


def start(
    state: Path,
    kubeconfig: Path,
    name: str,
    with_controllers: bool,
    attached: bool = False,
    audit: bool = False,
) -> Layout:
    """Start etcd and the API server (and, if asked, the controllers) with their state in `state`.

    Publishes an administrator's kubeconfig at `kubeconfig` and returns when the server is ready.
    `attached`: it all ends with this process, even with one that is killed. `audit`: every write
    is logged in logs/audit.log. Where starting fails, nothing is left running; state and logs stay
    for a look.
    """
    build.ensure(*(build.CONTROL_PLANE_BINARIES if with_controllers else build.API_BINARIES))
    layout = Layout(name, None, state, kubeconfig, Ports.free_on_loopback())
    if audit:
        state.mkdir(parents=True, exist_ok=True)
        write_audit_policy(layout)
    try:
        ControlPlane(layout, attached=attached).start(with_controllers)
    except BaseException:  # an interrupt, too: half a control plane is of no use to anyone
        processes.end_all(state)
        raise
    return layout


def stop(layout: Layout) -> None:
    """End the processes and remove state and kubeconfig."""
    processes.end_all(layout.state)
    shutil.rmtree(layout.state, ignore_errors=True)
    layout.kubeconfig.unlink(missing_ok=True)


@contextmanager
def temporary(name: str, with_controllers: bool = False, audit: bool = False) -> Iterator[Layout]:
    """etcd and an API server (and, if asked, the controllers) for the duration of a `with` block."""
    with tempfile.TemporaryDirectory(prefix="kvscaler-api-") as folder:
        state = Path(folder)
        layout = Layout(name, None, state / "state", state / "kubeconfig")
        try:
            yield start(
                layout.state, layout.kubeconfig, name, with_controllers, attached=True, audit=audit
            )
        finally:
            stop(layout)


def up(tree: Path, name: str) -> Layout:
    """The control plane of `hack/cluster/up --only control-plane`: kept until `down`."""
    started = time.monotonic()
    record = _record_path(tree, name)
    running = find(tree, name)
    if running is not None:
        alive = set(processes.running(running.state).values())
        if {build.path(binary).resolve() for binary in build.CONTROL_PLANE_BINARIES} <= alive:
            say(f"Control plane {name!r} is up already (kubeconfig: {running.kubeconfig})")
            return running
        say(f"Control plane {name!r} has crashed: starting afresh")
        down(tree, name)
    state_root = cache_dir() / "control-planes"
    state_root.mkdir(parents=True, exist_ok=True)
    state = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=state_root))
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"state": str(state)}))
    layout = start(state, kubeconfig_path(tree, name), name, with_controllers=True)
    say(f"Control plane {name!r} is up after {time.monotonic() - started:.1f} s")
    say(f"  kubeconfig: {layout.kubeconfig}  context: {layout.context}")
    return layout


def down(tree: Path, name: str) -> bool:
    """Stop it; False when this tree runs no control plane of that name."""
    layout = find(tree, name)
    if layout is None:
        return False
    started = time.monotonic()
    stop(layout)
    _record_path(tree, name).unlink()
    say(f"  {time.monotonic() - started:5.1f} s  control plane {name!r} down")
    return True


def find(tree: Path, name: str) -> Layout | None:
    record = _record_path(tree, name)
    if not record.exists():
        return None
    state = Path(json.loads(record.read_text())["state"])
    return Layout(name, None, state, kubeconfig_path(tree, name))


def _record_path(tree: Path, name: str) -> Path:
    return kubeconfig_path(tree, name).parent / RECORD
