"""The CustomResourceDefinition around the schema, and how an installed one is compared with it."""

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from kvscaler_api.schema import Schema, structural_schema
from kvscaler_api.service import (
    CATEGORY,
    GROUP,
    KIND,
    PLURAL,
    SHORT_NAME,
    SINGULAR,
    VERSION,
    InferenceService,
    InferenceServiceSpec,
)
from kvscaler_api.status import InferenceServiceStatus

CRD_NAME = f"{PLURAL}.{GROUP}"
PACKAGED_FILE = "inferenceservices.yaml"

_READY = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Ready", "type": "string", "jsonPath": f"{_READY}.status"},
    {"name": "Engine", "type": "string", "jsonPath": ".spec.engine.type"},
    {"name": "Replicas", "type": "integer", "jsonPath": ".status.replicas"},
    {"name": "Desired", "type": "integer", "jsonPath": ".status.desiredReplicas"},
    {"name": "KV%", "type": "integer", "jsonPath": ".status.occupancy.kvPercent"},
    {"name": "Binding", "type": "string", "jsonPath": ".status.decision.bindingConstraint"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Reason", "type": "string", "jsonPath": f"{_READY}.reason", "priority": 1},
)


def custom_resource_definition() -> dict[str, Any]:
    """The CRD of InferenceService, as it is installed."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": CRD_NAME,
            "labels": {
                "app.kubernetes.io/name": "kvscaler",
                "app.kubernetes.io/part-of": "kvscaler",
            },
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [dict(column) for column in _COLUMNS],
                    "schema": {"openAPIV3Schema": _object_schema()},
                }
            ],
        },
    }


def _object_schema() -> Schema:
    """The whole object: the API server itself knows and checks its type and metadata."""
    fields = InferenceService.model_fields
    return {
        "type": "object",
        "description": InferenceService.__doc__,
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {
                **structural_schema(InferenceServiceSpec),
                "description": fields["spec"].description,
            },
            "status": {
                **structural_schema(InferenceServiceStatus),
                "description": fields["status"].description,
            },
        },
        "required": ["spec"],
        "x-kubernetes-validations": [rule.to_wire() for rule in InferenceService.rules],
    }


def packaged_text() -> str:
    """The committed CRD that ships with this package, as YAML."""
    return (files("kvscaler_api") / PACKAGED_FILE).read_text(encoding="utf-8")


def missing_fields(installed: dict[str, Any]) -> tuple[str, ...]:
    """Paths that this version knows and an installed CRD lacks, such as `spec.cache.dtype`.

    The API server silently prunes such fields, so that a limit that a user wrote would not exist:
    for `SpecValid=False/CRDOutdated`. Empty when the installed CRD can store all that is known
    here; more fields than these (a newer CRD) are no fault.
    """
    versions = (installed.get("spec") or {}).get("versions") or []
    schema = next((v.get("schema", {}) for v in versions if v.get("name") == VERSION), None)
    if schema is None:
        return (VERSION,)
    there = set(_field_paths(schema.get("openAPIV3Schema") or {}))
    return tuple(path for path in field_paths() if path not in there)


def field_paths() -> tuple[str, ...]:
    """Paths of all fields of the API, such as `spec.cache.dtype`; `[]` stands for a list's items."""
    return tuple(_field_paths(_object_schema()))


def _field_paths(schema: Schema, prefix: str = "") -> Iterator[str]:
    for name, child in (schema.get("properties") or {}).items():
        path = f"{prefix}{name}"
        yield path
        yield from _field_paths(child, f"{path}.")
        yield from _field_paths(child.get("items") or {}, f"{path}[].")
