"""Every child of a service as the document that is applied."""

from kvscaler_operator.children.admission import admission_map
from kvscaler_operator.children.compare import with_hash
from kvscaler_operator.children.deployment import deployment
from kvscaler_operator.children.disruption import disruption_budget
from kvscaler_operator.children.intent import Intent
from kvscaler_operator.children.key_map import key_map
from kvscaler_operator.children.services import client_service, replicas_service
from kvscaler_operator.resources import Object


def child_documents(intent: Intent) -> list[Object]:
    """All children in the order in which they are made, each with the hash of its content."""
    keys = [key_map(intent)] if intent.public_keys else []
    documents = [
        *keys,
        admission_map(intent),
        client_service(intent),
        replicas_service(intent),
        disruption_budget(intent),
        deployment(intent),
    ]
    return [with_hash(document) for document in documents]
