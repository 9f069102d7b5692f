"""What every model of the API shares: camelCase on the wire, lenient reading, strict writing.

Objects are read leniently (a newer CRD may hold fields that this version does not know, and the
API server has already validated what it stored) and written strictly: `to_wire` emits only known
fields, under their wire names, without absent ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class Rule:
    """What fields mean together, once for the API server and once for Python.

    `cel` is evaluated by the API server and `holds` here, so that a file is checked the same way
    with and without a cluster; a test compares the two on generated objects. `holds` is None for a
    rule about a change, which needs the old object. The message is constant on purpose: a
    `messageExpression` that concatenates strings makes the API server's cost estimate unbounded,
    and the whole CRD is then refused.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None

    def to_wire(self) -> dict[str, str]:
        """The entry of `x-kubernetes-validations`."""
        return {"rule": self.cel, "message": self.message}

    def check(self, value: Any) -> None:
        """Raise ValueError with the message when the rule does not hold."""
        if self.holds is not None and not self.holds(value):
            raise ValueError(self.message)


@dataclass(frozen=True)
class Ruled:
    """`Annotated[T, Ruled(rule)]`: a rule about a single value."""

    rule: Rule

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def checked(value: Any) -> Any:
            self.rule.check(value)
            return value

        return core_schema.no_info_after_validator_function(checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "x-kubernetes-validations": [self.rule.to_wire()]}


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

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        result = handler(schema)
        if cls.rules:
            target = handler.resolve_ref_schema(result)
            target["x-kubernetes-validations"] = [rule.to_wire() for rule in cls.rules]
        return result

    @classmethod
    def from_wire(cls, value: dict[str, Any]) -> Self:
        """Read a decoded JSON object; raises `pydantic.ValidationError` on a wrong type or value."""
        return cls.model_validate(value)

    def to_wire(self) -> dict[str, Any]:
        """The JSON object that the API server stores: wire names, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


AS_SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
"""A list without duplicates, merged member by member by server-side apply."""

AS_ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""A list whose order matters: one owner replaces it whole."""


def as_map(*keys: str) -> dict[str, Any]:
    """A list of objects identified by `keys`, merged entry by entry by server-side apply."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
