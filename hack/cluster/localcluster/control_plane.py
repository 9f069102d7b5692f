"""etcd, the API server, the controller manager and the scheduler as plain processes."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from localcluster import build, pki, processes
from localcluster.api import Api
from localcluster.layout import Layout
from localcluster.steps import step, wait_until

HEALTHY_TIMEOUT_SECONDS = 120
QUERY_LIMITS = ("--kube-api-qps=200", "--kube-api-burst=400")


class ControlPlane:
    """`enter` is the command prefix that moves a process into the sandbox; empty without one.

    `attached` components are killed when this process ends.
    """

    def __init__(self, layout: Layout, enter: Sequence[str] = (), attached: bool = False) -> None:
        self.layout = layout
        self.enter = enter
        self.attached = attached

    def start(self, with_controllers: bool = True) -> None:
        """Start what does not run yet and wait until all of it is healthy."""
        if not (self.layout.pki / "admin.kubeconfig").exists():
            with step("keys and certificates"):
                pki.create(self.layout)
                publish_kubeconfig(self.layout)
        api = Api(self.layout.server, self.layout.pki)
        with step("etcd and API server ready"):
            self._start(self._etcd())
            self._start(self._apiserver())
            self._wait_for("kube-apiserver", api.ready)
        api.apply(
            "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", APISERVER_TO_KUBELET_BINDING
        )
        if with_controllers:
            with step("controller manager and scheduler ready"):
                self._start(self._controller_manager())
                self._start(self._scheduler())
                account = "/api/v1/namespaces/default/serviceaccounts/default"
                self._wait_for("kube-controller-manager", lambda: api.get(account) is not None)

    def _start(self, argv: list[str | Path]) -> None:
        executable = Path(argv[0])
        if processes.find(self.layout.state, executable) is None:
            log = self._log(executable.name)
            processes.start(self.layout.state, argv, log, self.enter, attached=self.attached)

    def _log(self, name: str) -> Path:
        return self.layout.logs / f"{name}.log"

    def _wait_for(self, name: str, healthy: Callable[[], bool]) -> None:
        def still_possible() -> None:
            for component in ("etcd", name):
                if processes.find(self.layout.state, build.path(component)) is None:
                    raise processes.died(build.path(component), self._log(component))

        wait_until(healthy, f"{name} is healthy", HEALTHY_TIMEOUT_SECONDS, still_possible)

    def _etcd(self) -> list[str | Path]:
        layout = self.layout
        client = f"http://127.0.0.1:{layout.ports.etcd}"
        peer = f"http://127.0.0.1:{layout.ports.etcd_peer}"
        return [
            build.path("etcd"),
            f"--name={layout.context}",
            f"--data-dir={layout.state / 'etcd'}",
            "--unsafe-no-fsync",  # a throw-away cluster: speed before durability
            "--log-level=warn",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={layout.context}={peer}",
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=10000",
        ]

    def _apiserver(self) -> list[str | Path]:
        layout, certificates = self.layout, self.layout.pki
        if layout.slot is None:
            # Nothing routes to the `kubernetes` Service without a node, and the API server refuses
            # to publish a loopback address as its endpoint.
            place = ["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"]
        else:
            place = ["--bind-address=0.0.0.0"]
        audit = []
        if is_audited(layout):
            audit = [
                f"--audit-policy-file={layout.audit_policy}",
                f"--audit-log-path={layout.logs / 'audit.log'}",
            ]
        return [
            build.path("kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{layout.ports.etcd}",
            *place,
            *audit,
            f"--advertise-address={layout.node_address}",
            f"--secure-port={layout.ports.apiserver}",
            f"--tls-cert-file={certificates / 'apiserver.crt'}",
            f"--tls-private-key-file={certificates / 'apiserver.key'}",
            f"--client-ca-file={certificates / 'ca.crt'}",
            f"--service-cluster-ip-range={layout.service_range}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={certificates / 'service-account.pub'}",
            f"--service-account-signing-key-file={certificates / 'service-account.key'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={certificates / 'apiserver-kubelet-client.crt'}",
            f"--kubelet-client-key={certificates / 'apiserver-kubelet-client.key'}",
            f"--kubelet-certificate-authority={certificates / 'ca.crt'}",
            "--kubelet-preferred-address-types=InternalIP,Hostname",
            f"--requestheader-client-ca-file={certificates / 'front-proxy-ca.crt'}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={certificates / 'front-proxy-client.crt'}",
            f"--proxy-client-key-file={certificates / 'front-proxy-client.key'}",
            "--enable-priority-and-fairness=false",
            "--profiling=false",
            "--event-ttl=1h",
        ]

    def _controller_manager(self) -> list[str | Path]:
        layout, certificates = self.layout, self.layout.pki
        return [
            build.path("kube-controller-manager"),
            *self._as_user("kube-controller-manager"),
            "--bind-address=127.0.0.1",
            f"--secure-port={layout.ports.controller_manager}",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={certificates / 'service-account.key'}",
            f"--root-ca-file={certificates / 'ca.crt'}",
            f"--cluster-signing-cert-file={certificates / 'ca.crt'}",
            f"--cluster-signing-key-file={certificates / 'ca.key'}",
            "--allocate-node-cidrs=true",
            f"--cluster-cidr={layout.pod_range}",
            "--node-cidr-mask-size=24",
            f"--service-cluster-ip-range={layout.service_range}",
            "--node-monitor-grace-period=40s",
            *QUERY_LIMITS,
        ]

    def _scheduler(self) -> list[str | Path]:
        return [
            build.path("kube-scheduler"),
            *self._as_user("kube-scheduler"),
            "--bind-address=127.0.0.1",
            f"--secure-port={self.layout.ports.scheduler}",
            "--leader-elect=false",
            *QUERY_LIMITS,
        ]

    def _as_user(self, user: str) -> list[str]:
        kubeconfig = self.layout.pki / f"{user}.kubeconfig"
        flags = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        return [f"--{flag}={kubeconfig}" for flag in flags]


# Logs, exec and port-forward: the API server calls the kubelet with its own client certificate.
APISERVER_TO_KUBELET_BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "kvscaler-local:apiserver-to-kubelet"},
    "roleRef": {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "system:kubelet-api-admin",
    },
    "subjects": [
        {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "User",
            "name": "kube-apiserver-kubelet-client",
        }
    ],
}


# Who wrote what and when, without the objects themselves.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "Metadata"},
    ],
}


def is_audited(layout: Layout) -> bool:
    return layout.audit_policy.exists()


def write_audit_policy(layout: Layout) -> None:
    layout.audit_policy.write_text(json.dumps(AUDIT_POLICY, indent=1))


def publish_kubeconfig(layout: Layout) -> None:
    """Put the administrator's kubeconfig where the user and the tests look for it."""
    layout.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(layout.pki / "admin.kubeconfig", layout.kubeconfig)
