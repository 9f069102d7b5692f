"""The namespaces that a cluster lives in: its own network, processes and mounts.

Killing the sandbox's first process makes the kernel end everything inside, drop every mount, and,
with the network namespace, every interface, address and packet-filter rule. So stopping a cluster
needs no knowledge of what ran in it.

Network: one veth pair joins host and cluster. The host has routes to Pods and Services through it;
the cluster has no default route, so nothing inside reaches the world.
"""

import ipaddress
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from localcluster import build, processes
from localcluster.layout import Layout
from localcluster.steps import ClusterError, wait_until

# Folders of the machine that components write to without being asked: private ones inside.
PRIVATE_FOLDERS = ("/run", "/var/log", "/var/lib/cni")
# A fallback for when the link is gone: better refused here than answered by a stranger outside.
FALLBACK_METRIC = "4096"


def first_process(layout: Layout) -> int | None:
    """The host's process id of the sandbox's process 1, or None when there is no live sandbox."""
    if not layout.network_namespace.exists():
        return None
    return processes.find(layout.state, build.path("pause"))


def enter(layout: Layout) -> list[str]:
    """Command prefix that runs a command inside. Raises ClusterError when there is no sandbox."""
    init = first_process(layout)
    if init is None:
        raise ClusterError(f"cluster {layout.name!r} is not up: run hack/cluster/up")
    return ["nsenter", "--target", str(init), "--mount", "--net", "--pid", "--"]


def run(*command: str, text: str | None = None) -> None:
    """Run a host command; raises ClusterError with its own words when it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def range_in_use(layout: Layout) -> str | None:
    """A route of this machine that overlaps the slot's ranges (say, a VPN's), in words."""
    listed = subprocess.run(
        ["ip", "-json", "route", "show", "table", "all"], capture_output=True, text=True, check=True
    )
    for route in json.loads(listed.stdout):
        try:
            taken = ipaddress.IPv4Network(route["dst"], strict=False)
        except ValueError:  # "default" and IPv6
            continue
        for wanted in (layout.link, layout.pod_range, layout.service_range):
            if taken.overlaps(wanted):
                return f"{wanted} (route {route['dst']} {route.get('dev', '')})"
    return None


def create(layout: Layout) -> None:
    """Make the namespaces, the link, the routes and the rule that refuses unserved Services."""
    run("ip", "netns", "add", layout.identity)
    host_link, node_link = layout.identity, "eth0"
    run("ip", "link", "add", host_link, "type", "veth", "peer", node_link, "netns", layout.identity)
    prefix = layout.link.prefixlen
    run("ip", "address", "add", f"{layout.host_address}/{prefix}", "dev", host_link)
    run("ip", "link", "set", host_link, "up")
    inside = ["ip", "-netns", layout.identity]
    run(*inside, "address", "add", f"{layout.node_address}/{prefix}", "dev", node_link)
    run(*inside, "link", "set", node_link, "up")
    run(*inside, "link", "set", "lo", "up")
    # kube-proxy rewrites a Service's address only after the kernel has found a route for it.
    run(*inside, "route", "add", str(layout.service_range), "via", str(layout.host_address))
    for reachable in (layout.pod_range, layout.service_range):
        run("ip", "route", "add", str(reachable), "via", str(layout.node_address))
        run("ip", "route", "add", "unreachable", str(reachable), "metric", FALLBACK_METRIC)
    _refuse_unserved_services(layout)
    _start_first_process(layout)


def _refuse_unserved_services(layout: Layout) -> None:
    """Refuse packets to a Service address that no rule has rewritten, before kube-proxy starts."""
    rules = ["*filter"]
    for chain in ("FORWARD", "OUTPUT"):
        match = f"-A {chain} -d {layout.service_range}"
        rules.append(f"{match} -p tcp -j REJECT --reject-with tcp-reset")
        rules.append(f"{match} -j REJECT --reject-with icmp-port-unreachable")
    rules.append("COMMIT\n")
    within = ["nsenter", f"--net={layout.network_namespace}"]
    run(*within, "iptables-restore", "--noflush", text="\n".join(rules))


def _start_first_process(layout: Layout) -> None:
    pause = build.path("pause").resolve()
    private = "".join(
        f"mkdir -p {folder} && mount -t tmpfs -o mode=755 tmpfs {folder}\n"
        for folder in PRIVATE_FOLDERS
    )
    script = f"""set -e
{private}mount --make-rshared /
echo 1 >/proc/sys/net/ipv4/ip_forward
echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables
exec {shlex.quote(str(pause))}
"""
    unshare = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--propagation", "slave"]
    layout.logs.mkdir(parents=True, exist_ok=True)
    log = layout.logs / "sandbox.log"
    with log.open("ab") as output:
        subprocess.Popen(
            ["nsenter", f"--net={layout.network_namespace}", *unshare, "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={"PATH": os.environ["PATH"], processes.MARKER: str(layout.state)},
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: first_process(layout) is not None,
            "the sandbox's first process runs",
            processes.START_TIMEOUT_SECONDS,
        )
    except ClusterError as error:
        raise processes.died(pause, log) from error


def destroy(layout: Layout) -> None:
    """End everything inside and remove what the host holds of it. Fine on a half-made sandbox."""
    init = first_process(layout)
    if init is not None:
        with suppress(ProcessLookupError):
            os.kill(init, signal.SIGKILL)
    processes.end_all(layout.state)
    for reachable in (layout.pod_range, layout.service_range):
        _try("ip", "route", "del", "unreachable", str(reachable), "metric", FALLBACK_METRIC)
    if Path("/sys/class/net", layout.identity).exists():
        run("ip", "link", "del", layout.identity)  # the other end and the routes go with it
    if layout.network_namespace.exists():
        run("ip", "netns", "del", layout.identity)


def _try(*command: str) -> None:
    """For what may already be gone: failing is not an error here."""
    subprocess.run(command, capture_output=True, check=False)


def run_inside(layout: Layout, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the sandbox's network only (the host's files and processes)."""
    within = ["nsenter", f"--net={layout.network_namespace}", "--", *command]
    return subprocess.run(within, capture_output=True, text=True, check=False)
