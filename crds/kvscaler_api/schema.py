"""From a pydantic model to the structural OpenAPI v3 schema that a CRD needs.

Pydantic writes JSON Schema 2020-12; the API server takes a subset of OpenAPI 3.0 with rules of its
own: no references, no null types, no constants, defaults that are complete, and bounds on all that
CEL rules walk. Each difference is translated here, and a keyword that has no translation is an
error, so that a constraint can't get lost on the way without anyone noticing.
"""

from copy import deepcopy
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from kvscaler_api.base import ApiModel

Schema = dict[str, Any]


class UntranslatableError(ValueError):
    """A schema that cannot be written for a CRD; the text has the path and the cause."""


_KEPT = frozenset(
    {
        "type",
        "description",
        "format",
        "pattern",
        "enum",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "minItems",
        "maxItems",
        "maxProperties",
        "required",
        "x-kubernetes-int-or-string",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-list-type",
        "x-kubernetes-preserve-unknown-fields",
        "x-kubernetes-validations",
    }
)
_INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]
_FORMATS = frozenset({"date-time", "int64"})


class _WireDefaults(GenerateJsonSchema):
    """Writes defaults as they appear on the wire: `5m` and not 300.0."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        result = super().default_schema(schema)
        default = schema.get("default")
        if isinstance(default, ApiModel):
            # Spelled out: rules are checked on a default before the defaults inside it are filled.
            result["default"] = default.to_wire()
        inner: Any = schema["schema"]
        while inner["type"] in ("nullable", "default"):
            inner = inner["schema"]
        write = inner.get("serialization", {}).get("function")
        if write is not None and default is not None:
            result["default"] = write(default)
        return result


def structural_schema(model: type[BaseModel]) -> Schema:
    """The structural schema of a model, with defaults, bounds, list types and CEL rules.

    Raises UntranslatableError for anything that a CRD cannot say, and for a string, list or map
    without a bound.
    """
    document = model.model_json_schema(by_alias=True, schema_generator=_WireDefaults)
    return _Translator(document.pop("$defs", {})).translate(document, model.__name__)


class _Translator:
    def __init__(self, definitions: dict[str, Schema]) -> None:
        self._definitions = definitions

    def translate(self, source: Schema, path: str, seen: tuple[str, ...] = ()) -> Schema:
        node, seen = self._resolved(source, path, seen)
        node.pop("title", None)
        if "const" in node:
            node["enum"] = [node.pop("const")]
        if node.get("additionalProperties") is False:
            del node["additionalProperties"]
        self._bound_form(node, path)

        result: Schema = {}
        for keyword, value in node.items():
            here = f"{path}.{keyword}"
            if keyword in _KEPT:
                result[keyword] = value
            elif keyword == "default":
                if value is not None:
                    result[keyword] = value
            elif keyword == "properties":
                result[keyword] = {
                    name: self.translate(child, f"{path}.{name}", seen)
                    for name, child in value.items()
                }
            elif keyword in ("items", "additionalProperties") and isinstance(value, dict):
                result[keyword] = self.translate(value, here, seen)
            elif keyword in ("exclusiveMinimum", "exclusiveMaximum") and value is True:
                result[keyword] = value
            elif keyword == "anyOf" and node.get("x-kubernetes-int-or-string"):
                if value != _INT_OR_STRING:
                    raise UntranslatableError(f"{here}: an int-or-string has exactly {value}")
                result[keyword] = value
            else:
                raise UntranslatableError(f"{here}: a CRD has no such keyword ({value!r})")
        self._check(result, path)
        default = result.get("default")
        if isinstance(default, str | int) and default != "" and "description" in result:
            # `kubectl explain` shows no defaults of its own.
            result["description"] += f" Default: {default}."
        return result

    def _resolved(
        self, source: Schema, path: str, seen: tuple[str, ...]
    ) -> tuple[Schema, tuple[str, ...]]:
        """The node without references, wrappers and null; outer keywords win over inner ones."""
        node = deepcopy(source)
        while True:
            if "$ref" in node:
                name = node.pop("$ref").removeprefix("#/$defs/")
                if name in seen:
                    raise UntranslatableError(f"{path}: {name} contains itself")
                seen = (*seen, name)
                node = {**deepcopy(self._definitions[name]), **node}
            elif len(node.get("allOf", ())) == 1:
                node = {**node.pop("allOf")[0], **node}
            elif {"type": "null"} in node.get("anyOf", ()):
                variants = [other for other in node.pop("anyOf") if other != {"type": "null"}]
                if len(variants) != 1:
                    raise UntranslatableError(f"{path}: a union of {len(variants)} types")
                node = {**variants[0], **node}
            else:
                return node, seen

    @staticmethod
    def _bound_form(node: Schema, path: str) -> None:
        """Numeric exclusive bounds become the boolean beside an inclusive one."""
        for exclusive, inclusive in (
            ("exclusiveMinimum", "minimum"),
            ("exclusiveMaximum", "maximum"),
        ):
            bound = node.get(exclusive)
            if bound is None or isinstance(bound, bool):
                continue
            if inclusive in node:
                raise UntranslatableError(f"{path}: both {exclusive} and {inclusive}")
            node[inclusive], node[exclusive] = bound, True

    @staticmethod
    def _check(node: Schema, path: str) -> None:
        """Complete the node, and refuse what the API server or its cost estimate would."""
        kind = node.get("type")
        if kind is None and not node.get("x-kubernetes-int-or-string"):
            raise UntranslatableError(f"{path}: no type")
        if kind == "number":
            raise UntranslatableError(f"{path}: the API has no floating-point numbers")
        if kind == "integer":
            node.setdefault("format", "int64")
        if node.get("format", "int64") not in _FORMATS:
            raise UntranslatableError(f"{path}: unknown format {node['format']}")
        if kind == "string" and not node.keys() & {"maxLength", "enum", "format"}:
            raise UntranslatableError(f"{path}: a string without maxLength")
        if kind == "array":
            if "maxItems" not in node or "items" not in node:
                raise UntranslatableError(f"{path}: a list without items or maxItems")
            if node["items"]["type"] == "object" and "x-kubernetes-list-type" not in node:
                raise UntranslatableError(f"{path}: a list of objects without a list type")
        if kind == "object":
            if "properties" in node and "additionalProperties" in node:
                raise UntranslatableError(f"{path}: both properties and additionalProperties")
            if "additionalProperties" in node and "maxProperties" not in node:
                raise UntranslatableError(f"{path}: a map without maxProperties")
