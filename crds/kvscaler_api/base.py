"""What every model of the API shares: camelCase on the wire, lenient reading, strict writing.

Objects are read leniently (a newer CRD may hold fields that this version does not know, and the
API server has already validated what it stored) and written strictly: `to_wire` emits only known
fields, under their wire names, without absent ones.
"""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """An immutable part of an API object."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        validate_default=False,
    )

    @classmethod
    def from_wire(cls, value: dict[str, Any]) -> Self:
        """Read a decoded JSON object; raises `pydantic.ValidationError` on a wrong type or value."""
        return cls.model_validate(value)

    def to_wire(self) -> dict[str, Any]:
        """The JSON object that the API server stores: wire names, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def cel(rule: str, message: str) -> dict[str, str]:
    """One `x-kubernetes-validations` entry.

    The message is constant on purpose: a `messageExpression` that concatenates strings makes the
    API server's cost estimate unbounded, and the whole CRD is then refused.
    """
    return {"rule": rule, "message": message}


def rules(*entries: dict[str, str]) -> dict[str, Any]:
    """`json_schema_extra` of a model or field that carries CEL rules."""
    return {"x-kubernetes-validations": list(entries)}


AS_SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
"""A list without duplicates, merged member by member by server-side apply."""

AS_ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""A list whose order matters: one owner replaces it whole."""


def as_map(*keys: str) -> dict[str, Any]:
    """A list of objects identified by `keys`, merged entry by entry by server-side apply."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
