"""Every example is accepted, and asks for nothing that this version does not do."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from kvscaler_api.conflicts import argument_conflicts, template_conflicts
from kvscaler_api.implemented import not_implemented
from kvscaler_api.service import KIND, read_service

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SERVICES = [
    pytest.param(value, id=f"{path.stem}-{index}")
    for path in EXAMPLES
    for index, value in enumerate(yaml.safe_load_all(path.read_text()))
    if value["kind"] == KIND
]


def test_there_are_examples() -> None:
    assert {"minimal", "smollm2"} <= {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("value", SERVICES)
def test_an_example_is_complete_and_acted_on(value: dict[str, Any]) -> None:
    spec = read_service(value).spec
    assert not_implemented(spec) == ()
    assert argument_conflicts(spec) == ()
    assert template_conflicts(spec) == ()


@pytest.mark.apiserver
@pytest.mark.parametrize("value", SERVICES)
def test_the_server_accepts_an_example(api: Any, value: dict[str, Any]) -> None:
    assert api.refusal(value) is None
