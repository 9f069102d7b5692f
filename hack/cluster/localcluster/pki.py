"""The certificates and kubeconfigs of one cluster: elliptic-curve keys, made anew at each start."""

import base64
import datetime
import json
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from localcluster.layout import Layout

VALID_FOR = datetime.timedelta(days=365)
CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH
SERVER = ExtendedKeyUsageOID.SERVER_AUTH
KUBECONFIG_USERS = {
    "admin": ("kubernetes-admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", None),
    "kube-scheduler": ("system:kube-scheduler", None),
    "kube-proxy": ("system:kube-proxy", None),
    "kwok": ("kwok", "system:masters"),
}


class Authority:
    """A certificate authority that writes what it issues into one folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, subject, self.key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        self.certificate = builder.sign(self.key, hashes.SHA256())
        _write_pair(folder / name, self.key, self.certificate)

    def issue(
        self,
        file_name: str,
        common_name: str,
        usages: list[x509.ObjectIdentifier],
        *,
        organisation: str | None = None,
        names: tuple[str, ...] = (),
        addresses: tuple[IPv4Address, ...] = (),
    ) -> None:
        """Write FILE_NAME.crt and FILE_NAME.key for `common_name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if organisation:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
        builder = _builder(x509.Name(attributes), self.certificate.subject, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
        if names or addresses:
            alternatives = [x509.DNSName(name) for name in names]
            builder = builder.add_extension(
                x509.SubjectAlternativeName(
                    [*alternatives, *(x509.IPAddress(address) for address in addresses)]
                ),
                False,
            )
        _write_pair(self.folder / file_name, key, builder.sign(self.key, hashes.SHA256()))


def create(layout: Layout) -> None:
    """Write every key, certificate and kubeconfig of the cluster into its `pki` folder."""
    folder = layout.pki
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority = Authority(folder, "ca")
    node_names = ("localhost", layout.node_name)
    local_addresses = (IPv4Address("127.0.0.1"), layout.node_address)
    service = "kubernetes.default.svc"
    authority.issue(
        "apiserver",
        "kube-apiserver",
        [SERVER],
        names=(
            *node_names,
            "kubernetes",
            "kubernetes.default",
            service,
            f"{service}.cluster.local",
        ),
        addresses=tuple({*local_addresses, layout.kubernetes_service_address}),
    )
    authority.issue("apiserver-kubelet-client", "kube-apiserver-kubelet-client", [CLIENT])
    authority.issue(
        "kubelet-serving",
        f"system:node:{layout.node_name}",
        [CLIENT, SERVER],
        organisation="system:nodes",
        names=node_names,
        addresses=tuple(set(local_addresses)),
    )
    front_proxy = Authority(folder, "front-proxy-ca")
    front_proxy.issue("front-proxy-client", "front-proxy-client", [CLIENT])
    _write_service_account_keys(folder)

    users = {**KUBECONFIG_USERS, "kubelet": (f"system:node:{layout.node_name}", "system:nodes")}
    for user, (common_name, organisation) in users.items():
        authority.issue(user, common_name, [CLIENT], organisation=organisation)
        _write_kubeconfig(layout, user)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + VALID_FOR)
    )


def _write_pair(stem: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    _write_key(Path(f"{stem}.key"), key)
    Path(f"{stem}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def _write_service_account_keys(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    _write_key(folder / "service-account.key", key)
    (folder / "service-account.pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def _write_kubeconfig(layout: Layout, user: str) -> None:
    """A kubeconfig with the certificates inside, so that the one file can be carried elsewhere."""

    def embedded(file_name: str) -> str:
        return base64.b64encode((layout.pki / file_name).read_bytes()).decode()

    cluster = {"server": layout.server, "certificate-authority-data": embedded("ca.crt")}
    credentials = {
        "client-certificate-data": embedded(f"{user}.crt"),
        "client-key-data": embedded(f"{user}.key"),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": layout.context, "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [
            {"name": layout.context, "context": {"cluster": layout.context, "user": user}}
        ],
        "current-context": layout.context,
    }
    target = layout.pki / f"{user}.kubeconfig"
    target.touch(mode=0o600)
    target.write_text(json.dumps(config, indent=1))
