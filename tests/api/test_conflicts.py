"""A second opinion beside a typed field is refused with both places named."""

from dataclasses import fields
from typing import Any

import pytest
from kvscaler_api.conflicts import OWNED_SETTINGS, argument_conflicts, template_conflicts
from kvscaler_api.service import InferenceServiceSpec, read_service
from kvscaler_sidecar.config import Settings

FREE_SETTINGS = {
    "models_dir",
    "executor",
    "compute_dtype",
    "time_scale",
    "modelled_start_seconds",
    "modelled_output_tokens",
    "threads",
    "drain_linger_seconds",
    "max_body_bytes",
    "max_connections",
    "log_level",
    "termination_log",
}
"""Options of the sidecar that no field of the API decides."""


def container(**values: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [{"name": "engine", **values}]}}}


def spec(changed: Any, patch: dict[str, Any]) -> InferenceServiceSpec:
    return read_service(changed(patch)).spec


@pytest.mark.parametrize("argument", ["--block-tokens=32", "--block-tokens"])
def test_arguments_that_repeat_a_field_are_named(changed: Any, argument: str) -> None:
    found = argument_conflicts(spec(changed, {"engine": {"args": ["--threads", "2", argument]}}))
    assert found == (f"spec.engine.args[2] {argument} repeats spec.cache.blockTokens: remove it",)


def test_environment_that_repeats_a_field_is_named(changed: Any) -> None:
    env = [{"name": "KVSCALER_MODEL_URI", "value": "x"}, {"name": "OMP_NUM_THREADS", "value": "1"}]
    assert argument_conflicts(spec(changed, container(env=env))) == (
        "spec.template: env KVSCALER_MODEL_URI of the container engine repeats spec.model.uri:"
        " remove it",
    )


def test_every_option_of_the_sidecar_is_owned_or_free() -> None:
    owned = {name.removeprefix("KVSCALER_").lower() for name in OWNED_SETTINGS}
    assert {field.name for field in fields(Settings)} == owned | FREE_SETTINGS
    assert not owned & FREE_SETTINGS


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        ({"terminationGracePeriodSeconds": 5}, "contradicts spec.scaling.scaleDown.drainTimeout"),
        ({"automountServiceAccountToken": True}, "serving Pods get no token"),
        ({"containers": [{"name": "engine", "image": "x"}]}, "contradicts spec.engine.image"),
        ({"containers": [{"name": "engine", "command": ["x"]}]}, "command of the container engine"),
        ({"containers": [{"name": "engine", "lifecycle": {}}]}, "the operator's own drain"),
    ],
)
def test_template_settings_that_would_be_overridden_are_named(
    changed: Any, pod: dict[str, Any], words: str
) -> None:
    (found,) = template_conflicts(spec(changed, {"template": {"spec": pod}}))
    assert words in found


def test_own_labels_cannot_be_set(changed: Any) -> None:
    labels = {"kvscaler.io/service-uid": "x", "team": "y"}
    (found,) = template_conflicts(spec(changed, {"template": {"metadata": {"labels": labels}}}))
    assert "kvscaler.io/service-uid is the operator's own" in found


def test_another_number_of_accelerators_contradicts(changed: Any) -> None:
    gpu = {"accelerator": {"name": "nvidia-l40s", "resourceName": "nvidia.com/gpu"}}
    two = container(resources={"limits": {"nvidia.com/gpu": "2", "memory": "1Gi"}})
    one = container(resources={"limits": {"nvidia.com/gpu": 1}})
    (found,) = template_conflicts(spec(changed, gpu | two))
    assert "resources.limits[nvidia.com/gpu] of the container engine is 2" in found
    assert template_conflicts(spec(changed, gpu | one)) == ()


@pytest.mark.parametrize("containers", [None, 3, "x", [None, "a"], [{"name": "engine", "env": 3}]])
def test_a_template_without_sense_is_left_to_the_dry_run(changed: Any, containers: Any) -> None:
    odd = spec(changed, {"template": {"spec": {"x": 1, "containers": containers}}})
    assert argument_conflicts(odd) == ()
    assert template_conflicts(odd) == ()
