"""Where everything of one cluster is: names, addresses, ports and paths, all from its slot number.

A slot is a small number that this machine gives to a running cluster; slots are what keeps two
clusters apart. A control plane alone (no node) takes no slot: it needs no root and no network of
its own, only free ports on the loopback address.
"""

import socket
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from localcluster.steps import cache_dir

DEFAULT_NAME = "local"
SLOTS = 16
SLOT_STATE_ROOT = Path("/var/lib/kvscaler")  # short: unix socket paths hold 107 bytes at most


@dataclass(frozen=True)
class Ports:
    etcd: int = 2379
    etcd_peer: int = 2380
    apiserver: int = 6443
    controller_manager: int = 10257
    scheduler: int = 10259
    kubelet: int = 10250
    kubelet_health: int = 10248
    proxy_health: int = 10256
    proxy_metrics: int = 10249
    kwok: int = 10247

    @classmethod
    def free_on_loopback(cls) -> "Ports":
        """Ports that nobody listens on now; held open together, so that they differ."""
        holders = [socket.socket() for _ in cls.__dataclass_fields__]
        try:
            for holder in holders:
                holder.bind(("127.0.0.1", 0))
            return cls(*(holder.getsockname()[1] for holder in holders))
        finally:
            for holder in holders:
                holder.close()


@dataclass(frozen=True)
class Layout:
    """One cluster's coordinates. `slot` is None for a control plane without a node."""

    name: str
    slot: int | None
    state: Path
    kubeconfig: Path
    ports: Ports = field(default_factory=Ports)

    @property
    def context(self) -> str:
        return f"kvscaler-{self.name}"

    # --- paths -------------------------------------------------------------------------------

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def audit_policy(self) -> Path:
        """Exists when the API server is to write an audit log, logs/audit.log."""
        return self.state / "audit-policy.json"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd.sock"

    @property
    def image_store(self) -> Path:
        """containerd's root: kept from one `up` to the next, one per slot (it can't be shared)."""
        return cache_dir() / "image-store" / str(self.slot)

    # --- network -----------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        return self.slot or 0

    @property
    def link(self) -> IPv4Network:
        return IPv4Network(f"10.224.{self._number}.0/30")

    @property
    def host_address(self) -> IPv4Address:
        return self.link[1]

    @property
    def node_address(self) -> IPv4Address:
        return self.link[2] if self.slot is not None else IPv4Address("127.0.0.1")

    @property
    def pod_range(self) -> IPv4Network:
        if self.slot is None:
            # Fake nodes' Pods: addresses of this machine, which a test may answer on.
            return IPv4Network("127.160.0.0/16")
        return IPv4Network(f"10.{160 + self.slot}.0.0/16")

    @property
    def node_pod_range(self) -> IPv4Network:
        """The first /24, which the first node to register is given; later ones are fake nodes."""
        return next(self.pod_range.subnets(new_prefix=24))

    @property
    def service_range(self) -> IPv4Network:
        return IPv4Network(f"10.{192 + self._number}.0.0/16")

    @property
    def kubernetes_service_address(self) -> IPv4Address:
        return self.service_range[1]

    @property
    def dns_address(self) -> IPv4Address:
        return self.service_range[10]

    @property
    def server(self) -> str:
        return f"https://{self.node_address}:{self.ports.apiserver}"

    # --- kernel objects ----------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Name of the network namespace, the cgroup and the host's end of the link."""
        return f"kvscaler{self.slot}"

    @property
    def network_namespace(self) -> Path:
        return Path("/run/netns") / self.identity

    @property
    def node_name(self) -> str:
        return self.context


def with_node(name: str, slot: int, kubeconfig: Path) -> Layout:
    return Layout(name, slot, SLOT_STATE_ROOT / str(slot), kubeconfig)


def kubeconfig_path(tree: Path, name: str) -> Path:
    """The default cluster's lies directly in build/cluster, for short commands."""
    folder = tree / "build" / "cluster"
    return folder / "kubeconfig" if name == DEFAULT_NAME else folder / name / "kubeconfig"
