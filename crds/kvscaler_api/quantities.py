"""Kubernetes quantities, Go durations and percentages: strings on the wire, numbers in Python.

Each type is metadata for `Annotated`: it parses the wire string, writes the canonical one, and
gives the schema that makes the API server accept exactly what is parsed here. Numbers are also
accepted when a model is built in Python, in the unit that the field's name carries.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, PlainSerializer
from pydantic_core import CoreSchema, core_schema

from kvscaler_api.base import Rule

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_QUANTITY_PATTERN = r"^[0-9]{1,19}(\.[0-9]{1,9})?([KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?$"
_QUANTITY = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)([KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?")
_INT64_MAX = 2**63 - 1

_UNIT_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_DURATION_PATTERN = r"^([0-9]{1,9}(\.[0-9]{1,3})?(ms|s|m|h)){1,4}$"
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,3})?(?:ms|s|m|h)){1,4}")
_DURATION_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(ms|s|m|h)")

_PERCENT_PATTERN = r"^(100(\.0{1,3})?|[0-9]{1,2}(\.[0-9]{1,3})?)%$"
_PERCENT = re.compile(r"(100(?:\.0{1,3})?|[0-9]{1,2}(?:\.[0-9]{1,3})?)%")

_DECIMAL_PATTERN = r"^-?[0-9]+(\.[0-9]+)?$"


def parse_quantity(text: str) -> int:
    """Bytes (or another whole unit) of a `resource.Quantity` such as `80Gi`, `1.5G` or `1e9`.

    Fractions of a unit are rounded up, as the API server does. Raises ValueError that names the
    text and the accepted forms.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity; write a number with a suffix, such as 80Gi")
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _BINARY:
        scale = Decimal(_BINARY[suffix])
    elif suffix in _DECIMAL:
        scale = Decimal(_DECIMAL[suffix])
    else:
        scale = Decimal(10) ** int(suffix[1:] or 0)
    value = math.ceil(number * scale)
    if value > _INT64_MAX:
        raise ValueError(f"{text!r} is more than a 64-bit quantity can hold")
    return value


def format_quantity(value: int) -> str:
    """The shortest exact binary form: 85899345920 becomes `80Gi`, 1000 stays `1000`."""
    for suffix, scale in reversed(_BINARY.items()):
        if value and value % scale == 0:
            return f"{value // scale}{suffix}"
    return str(value)


def parse_duration(text: str) -> float:
    """Seconds of a Go duration made of h, m, s and ms, such as `45s`, `1h30m` or `50ms`."""
    if _DURATION.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no duration; write numbers with units, such as 45s or 1h30m")
    parts = _DURATION_PART.findall(text)
    return float(sum(Decimal(number) * _UNIT_SECONDS[unit] for number, unit in parts))


def format_duration(seconds: float) -> str:
    """The Go duration with the largest units that are exact to a millisecond: 300.0 is `5m`."""
    milliseconds = round(seconds * 1000)
    if milliseconds == 0:
        return "0s"
    text = ""
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        if count:
            text += f"{count}{unit}"
    return text


def parse_percent(text: str) -> float:
    """The fraction of a percentage with at most three decimals: `99.9%` is 0.999."""
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no percentage; write 0% to 100%, such as 99.9%")
    return float(Decimal(match[1]) / 100)


def format_percent(fraction: float) -> str:
    """The percentage with at most three decimals: 0.999 is `99.9%`."""
    text = f"{fraction * 100:.3f}".rstrip("0").rstrip(".")
    return f"{text}%"


def _schema(
    parse: Callable[[Any], float], write: Callable[[Any], str], inner: CoreSchema
) -> CoreSchema:
    return core_schema.no_info_before_validator_function(
        parse,
        inner,
        serialization=core_schema.plain_serializer_function_ser_schema(write, when_used="json"),
    )


@dataclass(frozen=True)
class Quantity:
    """`Annotated[int, Quantity()]`: a whole number of bytes (or bytes per second), at least 1.

    `zero` allows 0. On the wire: an integer, or a string with an SI or binary suffix.
    """

    zero: bool = False

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        inner = core_schema.int_schema(ge=0 if self.zero else 1, le=_INT64_MAX)
        return _schema(
            lambda value: parse_quantity(value) if isinstance(value, str) else value,
            format_quantity,
            inner,
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        result: dict[str, Any] = {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": _QUANTITY_PATTERN,
            "maxLength": 32,
            "minimum": 0 if self.zero else 1,
        }
        if not self.zero:
            result["x-kubernetes-validations"] = [
                Rule(
                    "type(self) != string || quantity(self).isGreaterThan(quantity('0'))",
                    "must be greater than 0",
                    holds=None,  # The core schema's lower bound.
                ).to_wire()
            ]
        return result


@dataclass(frozen=True)
class Duration:
    """`Annotated[float, Duration("1s", "1h")]`: seconds, within bounds that the schema shows."""

    minimum: str = "1ms"
    maximum: str = "24h"

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        inner = core_schema.float_schema(
            ge=parse_duration(self.minimum),
            le=parse_duration(self.maximum),
            allow_inf_nan=False,
        )
        return _schema(
            lambda value: parse_duration(value) if isinstance(value, str) else value,
            format_duration,
            inner,
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        bounds = f"must be from {self.minimum} to {self.maximum}"
        return {
            "type": "string",
            "pattern": _DURATION_PATTERN,
            "maxLength": 32,
            "x-kubernetes-validations": [
                Rule(
                    f"duration(self) >= duration('{self.minimum}')"
                    f" && duration(self) <= duration('{self.maximum}')",
                    bounds,
                    holds=None,  # The core schema's bounds.
                ).to_wire()
            ],
        }


@dataclass(frozen=True)
class Percent:
    """`Annotated[float, Percent()]`: a fraction from 0 to 1; `positive` refuses 0 %."""

    positive: bool = False

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        inner = core_schema.float_schema(
            ge=0.00001 if self.positive else 0.0, le=1.0, allow_inf_nan=False
        )
        return _schema(
            lambda value: parse_percent(value) if isinstance(value, str) else value,
            format_percent,
            inner,
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        result: dict[str, Any] = {"type": "string", "pattern": _PERCENT_PATTERN, "maxLength": 8}
        if self.positive:
            result["x-kubernetes-validations"] = [
                Rule(
                    "self.matches('[1-9]')",
                    "must be greater than 0%",
                    holds=None,  # The core schema's lower bound.
                ).to_wire()
            ]
        return result


@dataclass(frozen=True)
class DecimalText:
    """`Annotated[float, DecimalText()]`: a float kept as text with four significant digits.

    The API's conventions forbid floating-point numbers; rounding also keeps status quiet.
    """

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return _schema(
            lambda value: float(value) if isinstance(value, str) else value,
            _format_decimal,
            core_schema.float_schema(allow_inf_nan=False),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": _DECIMAL_PATTERN, "maxLength": 40}


def _format_decimal(value: float) -> str:
    text = format(Decimal(f"{value:.4g}"), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _format_time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _aware(value: datetime | str) -> datetime | str:
    if isinstance(value, datetime) and value.tzinfo is None:
        raise ValueError("a time needs a zone; use datetime.now(UTC)")
    return value


Time = Annotated[
    datetime,
    BeforeValidator(_aware),
    PlainSerializer(_format_time, when_used="json", return_type=str),
]
"""A moment, written in UTC to the second as Kubernetes does."""
