"""The two Services: a stable one for clients, and a headless one that resolves to every replica."""

from kvscaler_operator.children.intent import (
    HTTP_PORT,
    STATE_PORT,
    Intent,
    document,
    replicas_service_name,
    selector,
)
from kvscaler_operator.resources import SERVICES, Object


def client_service(intent: Intent) -> Object:
    """`<name>`: what clients use. Only its selector will ever change (with the routing mode)."""
    spec = {
        "selector": selector(intent.uid),
        "ports": [_port("http", HTTP_PORT)],
    }
    return document(intent, SERVICES, intent.name, {"spec": spec})


def replicas_service(intent: Intent) -> Object:
    """`<name>-replicas`: headless, with addresses of Pods that are not ready too, as a router
    probes those itself."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(intent.uid),
        "ports": [_port("http", HTTP_PORT), _port("metrics", STATE_PORT)],
    }
    return document(intent, SERVICES, replicas_service_name(intent.name), {"spec": spec})


def _port(name: str, port: int) -> Object:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
