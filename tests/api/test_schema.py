"""The generator loses nothing, and its committed copies are current."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from kvscaler_api.base import AS_ATOMIC, ApiModel
from kvscaler_api.crd import custom_resource_definition, missing_fields, packaged_text
from kvscaler_api.generate import MAX_CRD_BYTES, main, outputs, render
from kvscaler_api.schema import UntranslatableError, structural_schema
from pydantic import BaseModel, Field

ROOT = Path(__file__).parents[2]


def only_property(model: type[BaseModel]) -> dict[str, Any]:
    (schema,) = structural_schema(model)["properties"].values()
    assert isinstance(schema, dict)
    return schema


def test_all_three_copies_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out
    assert len(outputs(ROOT)) == 4
    plain, packaged, chart, page = (path.read_text() for path in outputs(ROOT))
    assert "| `scaling.scaleDown.stabilizationWindow` | string |" in page
    assert plain == packaged == packaged_text()
    kept = yaml.safe_load(chart)
    assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert kept == yaml.safe_load(plain) == custom_resource_definition()
    assert len(chart.encode()) < MAX_CRD_BYTES == 256 * 1024


def test_a_stale_copy_is_found_and_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").touch()
    root = f"--root={tmp_path}"
    assert main([root, "--check"]) == 1
    assert "stale: charts/kvscaler/files/crd.yaml" in capsys.readouterr().out
    assert not (tmp_path / "crds").exists()
    assert main([root]) == 0
    assert main([root, "--check"]) == 0
    copy = tmp_path / "crds" / "kvscaler_api" / "inferenceservices.yaml"
    copy.write_text(copy.read_text() + "# edited\n")
    assert main([root, "--check"]) == 1


def test_a_crd_too_large_for_clients_is_refused() -> None:
    with pytest.raises(ValueError, match="are too many"):
        render({"x": "y" * MAX_CRD_BYTES})


def test_null_goes_and_inner_keywords_stay() -> None:
    class Model(ApiModel):
        size: Annotated[int, Field(ge=1)] | None = Field(None, description="A size.")

    assert only_property(Model) == {
        "type": "integer",
        "minimum": 1,
        "format": "int64",
        "description": "A size.",
    }


def test_exclusive_bounds_and_constants_get_their_openapi_form() -> None:
    class Model(ApiModel):
        size: Annotated[int, Field(gt=0, lt=9)]

    class Constant(ApiModel):
        kind: Literal["a"]

    assert only_property(Model) == {
        "type": "integer",
        "format": "int64",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 9,
        "exclusiveMaximum": True,
    }
    assert only_property(Constant) == {"type": "string", "enum": ["a"]}


def test_defaults_of_nested_models_are_spelled_out_and_described() -> None:
    class Inner(ApiModel):
        count: int = Field(3, description="A count.")
        text: Annotated[str, Field(max_length=3)] | None = Field(None)

    class Model(ApiModel):
        inner: Inner = Field(Inner(), description="Inside.")

    assert only_property(Model) == {
        "type": "object",
        "description": "Inside.",
        "default": {"count": 3},
        "properties": {
            "count": {
                "type": "integer",
                "format": "int64",
                "default": 3,
                "description": "A count. Default: 3.",
            },
            "text": {"type": "string", "maxLength": 3},
        },
    }


class Recursive(ApiModel):
    child: "Recursive | None" = None


class Unbounded(ApiModel):
    text: str


class UnboundedList(ApiModel):
    items: tuple[int, ...]


class UnboundedMap(ApiModel):
    entries: dict[str, int]


class FloatingPoint(ApiModel):
    ratio: float


class Union(ApiModel):
    either: Annotated[str, Field(max_length=3)] | bool


class UniqueItems(ApiModel):
    items: Annotated[frozenset[int], Field(max_length=3)]


class Multiple(ApiModel):
    even: Annotated[int, Field(multiple_of=2)]


class UntypedList(ApiModel):
    objects: Annotated[tuple[Unbounded, ...], Field(max_length=3)]


class UnknownFormat(ApiModel):
    address: Annotated[str, Field(json_schema_extra={"format": "ipv4"})]


class BothForms(ApiModel):
    size: Annotated[int, Field(gt=0, json_schema_extra={"minimum": 1})]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Recursive, "Recursive contains itself"),
        (Unbounded, "Unbounded.text: a string without maxLength"),
        (UnboundedList, "UnboundedList.items: a list without items or maxItems"),
        (UnboundedMap, "UnboundedMap.entries: a map without maxProperties"),
        (FloatingPoint, "no floating-point numbers"),
        (Union, "Union.either.anyOf: a CRD has no such keyword"),
        (UniqueItems, "uniqueItems: a CRD has no such keyword"),
        (Multiple, "Multiple.even.multipleOf: a CRD has no such keyword"),
        (UntypedList, "a string without maxLength"),
        (UnknownFormat, "UnknownFormat.address: unknown format ipv4"),
        (BothForms, "both exclusiveMinimum and minimum"),
    ],
)
def test_what_a_crd_cannot_say_is_an_error(model: type[BaseModel], words: str) -> None:
    with pytest.raises(UntranslatableError, match=words):
        structural_schema(model)


def test_a_list_of_objects_needs_a_list_type() -> None:
    class Item(ApiModel):
        count: int

    class Bare(ApiModel):
        objects: Annotated[tuple[Item, ...], Field(max_length=3)]

    class Typed(ApiModel):
        objects: tuple[Item, ...] = Field(max_length=3, json_schema_extra=AS_ATOMIC)

    with pytest.raises(UntranslatableError, match="a list of objects without a list type"):
        structural_schema(Bare)
    assert only_property(Typed)["x-kubernetes-list-type"] == "atomic"


def test_an_older_installed_crd_is_told_by_its_missing_fields() -> None:
    installed = custom_resource_definition()
    assert missing_fields(installed) == ()
    schema = installed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    schema["spec"]["properties"]["future"] = {"type": "string"}
    assert missing_fields(installed) == ()
    del schema["spec"]["properties"]["admission"]["properties"]["queue"]
    del schema["status"]["properties"]["conditions"]["items"]["properties"]["reason"]
    assert missing_fields(installed) == (
        "spec.admission.queue",
        "spec.admission.queue.maxRequests",
        "spec.admission.queue.maxWait",
        "status.conditions[].reason",
    )
    assert missing_fields({}) == ("v1alpha1",)
