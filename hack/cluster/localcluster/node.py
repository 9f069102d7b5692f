"""The node: containerd with a bridge network, the kubelet and kube-proxy, inside the sandbox.

Every setting that is not a default has its reason beside it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localcluster import build, cgroups, images, packages, processes, sandbox
from localcluster.api import Api
from localcluster.layout import Layout
from localcluster.steps import ClusterError, step, wait_until

CONTAINERD_TIMEOUT_SECONDS = 30
READY_TIMEOUT_SECONDS = 120
MAX_PODS = 250


class Node:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.enter = sandbox.enter(layout)
        self.containerd = packages.tool("containerd")

    # --- containerd --------------------------------------------------------------------------

    def start_containerd(self) -> None:
        """Start containerd if it does not run, without what an earlier cluster left in its store."""
        if processes.find(self.layout.state, self.containerd) is not None:
            return
        first_start = not (self.layout.state / "containerd").exists()
        with step("containerd and its images"):
            if first_start:
                self._forget_old_containers()
            self._run_containerd(with_kubernetes=True)
            images.ensure_system_images(self.layout)

    def _forget_old_containers(self) -> None:
        """Containers of a cluster that is gone are still in the store beside the images.

        The Kubernetes plugin would adopt them, so they go while containerd runs without it.
        """
        store = self.layout.image_store
        if not store.exists():
            return
        shutil.rmtree(store / "io.containerd.grpc.v1.cri", ignore_errors=True)
        self._run_containerd(with_kubernetes=False)
        old = images.ctr(self.layout, "containers", "ls", "-q").split()
        if old:
            images.ctr(self.layout, "containers", "rm", *old)
        processes.end(self.layout.state, self.containerd)

    def _run_containerd(self, with_kubernetes: bool) -> None:
        layout = self.layout
        network = layout.state / "network"
        network.mkdir(parents=True, exist_ok=True)
        layout.image_store.mkdir(parents=True, exist_ok=True)
        _write_if_changed(network / "10-pods.conflist", json.dumps(self._pod_network(), indent=1))
        config = layout.state / "containerd.toml"
        _write_if_changed(config, self._containerd_config(with_kubernetes))
        log = layout.logs / "containerd.log"
        command: list[str | Path] = [self.containerd, "--config", config, "--log-level", "warn"]
        processes.start(layout.state, command, log, self.enter)

        def serving() -> bool:
            try:
                images.ctr(layout, "version", timeout_seconds=images.COMMAND_TIMEOUT_SECONDS)
            except ClusterError:
                return False
            return True

        self._wait(serving, self.containerd, CONTAINERD_TIMEOUT_SECONDS)

    def _containerd_config(self, with_kubernetes: bool) -> str:
        layout = self.layout
        disabled = [
            *(f"io.containerd.snapshotter.v1.{name}" for name in UNUSED_SNAPSHOTTERS),
            "io.containerd.tracing.processor.v1.otlp",
            "io.containerd.internal.v1.opt",
        ]
        if not with_kubernetes:
            disabled.append("io.containerd.grpc.v1.cri")
        # sandbox_image is imported by us, never pulled. Lowering oom_score_adj is refused to
        # containers in many environments, and confining by AppArmor needs a profile loader.
        return f"""version = 2
root = "{layout.image_store}"
state = "{layout.state / "containerd"}"
oom_score = 0
disabled_plugins = {json.dumps(disabled)}
[grpc]
  address = "{layout.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.system_image("pause")}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  max_container_log_line_size = 262144
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{packages.network_plugins()}"
    conf_dir = "{layout.state / "network"}"
"""

    def _pod_network(self) -> dict[str, Any]:
        layout = self.layout
        bridge = {
            "type": "bridge",
            "bridge": "pods",
            "isGateway": True,
            "ipMasq": False,  # the host has a route back, and nothing else can be reached
            "hairpinMode": True,  # a Pod that calls its own Service
            "ipam": {
                "type": "host-local",
                "dataDir": str(layout.state / "pod-addresses"),
                "ranges": [[{"subnet": str(layout.node_pod_range)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "0.4.0", "name": layout.identity, "plugins": [bridge, ports]}

    # --- kubelet and kube-proxy --------------------------------------------------------------

    def start_agents(self, api: Api) -> None:
        """Start kubelet and kube-proxy if they do not run; returns when the node is Ready."""
        layout = self.layout
        cgroups.create(layout.identity)
        (layout.state / "resolv.conf").touch()  # Pods with dnsPolicy Default resolve nothing
        kubelet_config = layout.state / "kubelet.json"
        _write_if_changed(kubelet_config, json.dumps(self._kubelet_config(), indent=1))
        proxy_config = layout.state / "kube-proxy.json"
        _write_if_changed(proxy_config, json.dumps(self._proxy_config(), indent=1))
        root = layout.state / "kubelet"
        with step("node Ready"):
            self._start(
                "kubelet",
                f"--config={kubelet_config}",
                f"--kubeconfig={layout.pki / 'kubelet.kubeconfig'}",
                f"--root-dir={root}",
                f"--cert-dir={root / 'pki'}",
                f"--hostname-override={layout.node_name}",
                f"--node-ip={layout.node_address}",
            )
            self._start(
                "kube-proxy", f"--config={proxy_config}", f"--hostname-override={layout.node_name}"
            )
            kubelet = build.path("kubelet")
            self._wait(lambda: is_ready(layout, api), kubelet, READY_TIMEOUT_SECONDS)

    def _start(self, name: str, *flags: str) -> None:
        executable = build.path(name)
        if processes.find(self.layout.state, executable) is None:
            log = self.layout.logs / f"{name}.log"
            processes.start(self.layout.state, [executable, *flags], log, self.enter)

    def _wait(self, healthy: Callable[[], bool], executable: Path, timeout_seconds: float) -> None:
        def still_possible() -> None:
            if processes.find(self.layout.state, executable) is None:
                raise processes.died(executable, self.layout.logs / f"{executable.name}.log")

        wait_until(healthy, f"{executable.name} is healthy", timeout_seconds, still_possible)

    def _kubelet_config(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "0.0.0.0",  # of the cluster's own network namespace
            "port": layout.ports.kubelet,
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": layout.ports.kubelet_health,
            "readOnlyPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True, "cacheTTL": "10s"},
                "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(layout.pki / "kubelet-serving.crt"),
            "tlsPrivateKeyFile": str(layout.pki / "kubelet-serving.key"),
            "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
            "cgroupDriver": "cgroupfs",  # works with and without systemd
            # A subtree of our own: two kubelets do not meet, and removal is a clean rmdir.
            "cgroupRoot": f"/{layout.identity}",
            "failCgroupV1": False,  # since 1.35 the kubelet refuses version 1 unless told so
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": ["pods"],
            "failSwapOn": False,
            "clusterDNS": [str(layout.dns_address)],
            "clusterDomain": "cluster.local",
            "resolvConf": str(layout.state / "resolv.conf"),
            "maxPods": MAX_PODS,
            "serializeImagePulls": False,
            # Never collect images: imported by hand, they could not be pulled again.
            "imageMinimumGCAge": "8760h",
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": {
                "memory.available": "200Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "evictionPressureTransitionPeriod": "5s",
            "nodeStatusUpdateFrequency": "5s",
            "nodeLeaseDurationSeconds": 20,
            "syncFrequency": "10s",
            "kubeAPIQPS": 200,
            "kubeAPIBurst": 400,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
            "volumePluginDir": str(layout.state / "kubelet" / "volume-plugins"),
            "podLogsDir": str(layout.state / "pod-logs"),
            "oomScoreAdj": 0,  # the default, -999, is refused where lowering it is
        }

    def _proxy_config(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "bindAddress": "0.0.0.0",  # of the cluster's own network namespace
            "healthzBindAddress": f"127.0.0.1:{layout.ports.proxy_health}",
            "metricsBindAddress": f"127.0.0.1:{layout.ports.proxy_metrics}",
            "clientConnection": {"kubeconfig": str(layout.pki / "kube-proxy.kubeconfig")},
            "clusterCIDR": str(layout.pod_range),
            # Zeros leave the machine's connection-tracking settings as they are.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "iptables": {"minSyncPeriod": "200ms", "syncPeriod": "30s"},
        }


UNUSED_SNAPSHOTTERS = ("btrfs", "zfs", "aufs", "devmapper")


def is_ready(layout: Layout, api: Api) -> bool:
    """Whether the node is Ready. Raises ClusterError if its Pod range is not the bridge's."""
    node = api.get(f"/api/v1/nodes/{layout.node_name}")
    if node is None:
        return False
    given = node["spec"].get("podCIDR")
    if given is not None and given != str(layout.node_pod_range):
        raise ClusterError(
            f"node {layout.node_name} was given the Pod range {given}, not {layout.node_pod_range}: "
            "start afresh with hack/cluster/down, then up"
        )
    conditions = node.get("status", {}).get("conditions", [])
    return given is not None and any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def _write_if_changed(path: Path, text: str) -> None:
    """Write by rename and only a difference: kube-proxy exits when its file is written again."""
    if path.exists() and path.read_text() == text:
        return
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)
