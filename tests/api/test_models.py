"""Reading leniently, writing strictly, and what is said of an object that makes no sense."""

from typing import Any

import pytest
from kvscaler_api.engine import EngineType
from kvscaler_api.scaling import ScalingMode
from kvscaler_api.service import InferenceService, InvalidServiceError, read_service
from kvscaler_api.size import MAX_SPEC_BYTES, size_fault
from kvscaler_api.status import InferenceServiceStatus


def test_fields_are_read_in_their_units(changed: Any) -> None:
    spec = read_service(
        changed(
            {
                "accelerator": {"name": None, "memory": "80Gi", "bandwidth": "3350G"},
                "objectives": {"timePerOutputToken": "50ms", "attainment": "99.9%"},
                "scaling": {"scaleDown": {"stabilizationWindow": "45s"}},
            }
        )
    ).spec
    assert spec.accelerator.memory_bytes == 80 * 2**30
    assert spec.accelerator.bandwidth_bytes_per_second == 3_350_000_000_000
    assert spec.objectives.time_per_output_token_seconds == 0.05
    assert spec.objectives.attainment == 0.999
    assert spec.scaling.scale_down.stabilization_window_seconds == 45.0
    assert spec.scaling.scale_down.drain_timeout_seconds == 600.0
    assert spec.scaling.mode is ScalingMode.MANAGED
    assert spec.engine.type is EngineType.KVSCALER


def test_fields_of_a_newer_version_are_ignored_and_not_written(changed: Any) -> None:
    service = read_service(changed({"cache": {"fromTheFuture": 1}, "alsoNew": {"a": 1}}))
    written = service.to_wire()
    assert "alsoNew" not in written["spec"]
    assert "fromTheFuture" not in written["spec"]["cache"]
    assert InferenceService.from_wire(written) == service


def test_the_template_is_kept_as_written(changed: Any) -> None:
    pod = {"containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}], "new": None}
    service = read_service(changed({"template": {"metadata": {"labels": {"a": "b"}}, "spec": pod}}))
    assert service.spec.template is not None
    assert service.spec.template.spec == pod
    assert service.spec.template.metadata.labels == {"a": "b"}


def test_served_names_default_to_the_objects_name(changed: Any) -> None:
    assert read_service(changed({})).served_names == ("chat",)
    assert read_service(changed({"model": {"servedNames": ["a", "b"]}})).served_names == ("a", "b")


def test_every_fault_is_named_by_path_and_cause(changed: Any) -> None:
    with pytest.raises(InvalidServiceError) as caught:
        read_service(changed({"scaling": {"maxReplicas": 0}, "cache": {"blockTokens": 3}}))
    assert str(caught.value) == (
        "spec.cache.blockTokens: Value error, must be a power of two up to 256;"
        " spec.scaling.maxReplicas: Input should be greater than or equal to 1"
    )


@pytest.mark.parametrize("value", [{}, {"spec": {}}, {"metadata": {"name": "x"}, "spec": []}])
def test_what_is_no_service_at_all_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidServiceError, match=r"(metadata|spec)"):
        read_service(value)


def test_a_status_that_cannot_be_read_is_taken_as_empty(service: dict[str, Any]) -> None:
    service["status"] = {"replicas": 2, "model": {"source": "FromTheFuture", "digest": "d"}}
    assert read_service(service).status == InferenceServiceStatus()
    service["status"] = {"replicas": 2}
    assert read_service(service).status.replicas == 2
    service["status"] = {"replicas": "two"}
    service["spec"]["scaling"]["maxReplicas"] = 0
    with pytest.raises(InvalidServiceError, match=r"spec\.scaling\.maxReplicas"):
        read_service(service)


def test_paused_is_read_from_the_annotation(service: dict[str, Any]) -> None:
    assert not read_service(service).metadata.paused
    for text, paused in (("true", True), ("", True), ("false", False), ("False", False)):
        service["metadata"]["annotations"] = {"kvscaler.io/paused": text}
        assert read_service(service).metadata.paused is paused


def test_size_is_judged_at_its_bound(changed: Any) -> None:
    base = changed({"template": {"spec": {"x": ""}}})
    import json

    used = len(json.dumps(base["spec"], separators=(",", ":")))
    base["spec"]["template"]["spec"]["x"] = "é" * ((MAX_SPEC_BYTES - used) // 2)
    assert size_fault(base) is None
    base["spec"]["template"]["spec"]["x"] += "éé"
    assert "the largest part is spec.template" in (size_fault(base) or "")
    assert size_fault({}) is None
