"""What the cluster already stores about a service: status as written before, image, pause."""

import json

from kvscaler_api.metadata import PAUSED_ANNOTATION
from kvscaler_api.status import InferenceServiceStatus
from kvscaler_api.status_budget import FactsSource
from kvscaler_api.template import ENGINE_CONTAINER
from pydantic import ValidationError

from kvscaler_operator.assess import Facts
from kvscaler_operator.resources import Object


def paused(obj: Object) -> bool:
    """Whether the pause annotation is set to anything but "false"."""
    annotations = obj["metadata"].get("annotations") or {}
    return str(annotations.get(PAUSED_ANNOTATION, "false")).lower() != "false"


def status_of(obj: Object) -> InferenceServiceStatus:
    """The status as it was written; empty when another version wrote what can't be read."""
    try:
        return InferenceServiceStatus.from_wire(obj.get("status") or {})
    except ValidationError:
        return InferenceServiceStatus()


def facts(status: InferenceServiceStatus) -> Facts | None:
    """Facts that a replica once read from the model's files."""
    model = status.model
    if model is None or model.source is not FactsSource.REPLICA or model.facts is None:
        return None
    try:
        read = json.loads(model.facts)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def running_image(deployment: Object | None) -> str | None:
    """The image of the engine's container in a Deployment."""
    if deployment is None:
        return None
    containers = deployment["spec"]["template"]["spec"].get("containers") or ()
    return next((str(c["image"]) for c in containers if c.get("name") == ENGINE_CONTAINER), None)
