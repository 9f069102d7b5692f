"""Models and API server judge alike: what one accepts the other does, down to the stored bytes."""

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kvscaler_api.service import InvalidServiceError, read_service

pytestmark = pytest.mark.apiserver

COUNTS = st.integers(-1, 3) | st.sampled_from([50, 99, 100, 10_000, 10_001])
DURATIONS = st.sampled_from(
    ["0s", "1ms", "999ms", "1s", "5s", "10s", "1m", "61s", "59m60s", "1h", "1h1ms", "24h", "168h"]
) | st.from_regex(r"\A[0-9]{1,3}(\.[0-9]{1,3})?(ms|s|m|h)\Z")
PERCENTS = st.sampled_from(["0%", "0.000%", "0.001%", "99%", "100%", "100.001%", "99", ""]) | (
    st.from_regex(r"\A[0-9]{1,3}(\.[0-9]{1,4})?%\Z")
)
QUANTITIES = (
    st.integers(-1, 2**50)
    | st.sampled_from(["0", "0Gi", "80Gi", "1.5G", "1e9", "1E", "5m", "-1", "1.0000000001Gi"])
    | st.from_regex(r"\A[0-9]{1,3}(\.[0-9])?([KMGT]i|[kMGT])?\Z")
)
URIS = st.sampled_from(
    [
        "hf://a/b",
        "hf://a",
        "hf://a/b/c",
        "builtin://x",
        "builtin://X",
        "builtin://x/y",
        "pvc://claim",
        "pvc://claim/a/b.c",
        "pvc://claim/a/../b",
        "pvc://claim/...",
        "s3://bucket/k=v",
        "file:///etc",
        "pvc://claim/a\n",
        "",
    ]
) | st.from_regex(r"\A(hf|builtin|pvc|s3)://[a-z./-]{1,12}\Z")
NAMES = st.sampled_from(["a", "A", "a-b", "-a", "a.b", "", "a" * 63, "a" * 64, "a/b"])

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "replicas": COUNTS,
    "model.uri": URIS,
    "model.revision": NAMES,
    "model.servedNames": st.lists(NAMES, max_size=3, unique=True),
    "model.maxContextTokens": COUNTS,
    "engine.type": st.sampled_from(["Kvscaler", "VLLM", "vllm"]),
    "engine.image": st.sampled_from(["docker.io/a/b:c", "", "a b"]),
    "engine.args": st.lists(st.sampled_from(["--a", ""]), max_size=2),
    "engine.memoryUtilizationPercent": COUNTS,
    "engine.tensorParallel": COUNTS,
    "engine.pipelineParallel": COUNTS,
    "accelerator.name": NAMES,
    "accelerator.memory": QUANTITIES,
    "accelerator.bandwidth": QUANTITIES,
    "accelerator.resourceName": st.sampled_from(["nvidia.com/gpu", "cpu", "a/b/c", "/x"]),
    "cache.dtype": st.sampled_from(["Auto", "FP8", "auto"]),
    "cache.blockTokens": st.integers(-1, 20) | st.sampled_from([128, 256, 512]),
    "cache.watermarkPercent": COUNTS,
    "objectives.timeToFirstToken": DURATIONS,
    "objectives.timePerOutputToken": DURATIONS,
    "objectives.attainment": PERCENTS,
    "scaling.mode": st.sampled_from(["Managed", "Advisory", "External", "managed"]),
    "scaling.minReplicas": COUNTS,
    "scaling.maxReplicas": COUNTS,
    "scaling.scaleDown.stabilizationWindow": DURATIONS,
    "scaling.scaleDown.drainTimeout": DURATIONS,
    "scaling.scaleDown.toZeroAfter": DURATIONS,
    "scaling.onMissingSignals.for": DURATIONS,
    "admission.mode": st.sampled_from(["Enforce", "Observe", "Off"]),
    "admission.charge": st.sampled_from(["WorstCase", "Expected", "PromptOnly", "None"]),
    "admission.queue.maxRequests": COUNTS,
    "admission.queue.maxWait": DURATIONS,
    "routing.mode": st.sampled_from(["Direct", "Router", "Gateway"]),
    "routing.router.replicas": COUNTS,
    "routing.trustedHeaders": st.lists(
        st.sampled_from(["x-tenant", "X-Tenant", ""]), max_size=2, unique=True
    ),
    "optimization.allow": st.lists(
        st.sampled_from(["PrefixCaching", "KVOffload", "Magic"]), max_size=3, unique=True
    ),
    "signals.prometheus": NAMES,
    "targetRef": st.just({"apiVersion": "apps/v1", "kind": "Deployment", "name": "x"}),
    "template.spec": st.just({"containers": [{"name": "engine"}]}),
}
"""Values at and around each field's bounds; types are right, as Python reads them leniently."""

CHANGES = st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True).flatmap(
    lambda paths: st.fixed_dictionaries({path: FIELDS[path] for path in paths})
)


def written(spec: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = spec
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return spec


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=CHANGES)
@example(changes={"objectives.attainment": "100.0%"})
@example(changes={"scaling.scaleDown.drainTimeout": "86400000ms"})
@example(changes={"accelerator.memory": 5, "accelerator.bandwidth": "1"})
def test_models_and_server_accept_the_same_objects(
    api: Any, changed: Any, changes: dict[str, Any]
) -> None:
    value = changed({})
    written(value["spec"], changes)
    try:
        read = read_service(value)
    except InvalidServiceError as error:
        assert api.refusal(value) is not None, f"only the models refuse: {error}"
        return
    stored = api.create(value, dry_run="All")
    assert read_service(stored).spec == read.spec
    canonical = {**value, "spec": read.spec.to_wire()}
    assert api.create(canonical, dry_run="All")["spec"] == canonical["spec"]


def test_every_field_of_the_spec_takes_part(api: Any) -> None:
    del api
    from kvscaler_api.crd import field_paths

    untouched = {
        path
        for path in field_paths()
        if path.startswith("spec.")
        and not any(f"spec.{field}.".startswith(f"{path}.") for field in FIELDS)
        and not any(f"{path}.".startswith(f"spec.{field}.") for field in FIELDS)
    }
    # Enumerations and preserved objects, whose every value is tested by name elsewhere.
    assert {path for path in untouched if not path.startswith("spec.model.architecture")} == {
        "spec.model.credentialsSecretRef",
        "spec.model.credentialsSecretRef.name",
        "spec.cache.prefixCaching",
        "spec.scaling.onMissingSignals.policy",
        "spec.routing.router.resources",
        "spec.routing.router.resources.requests",
        "spec.routing.router.resources.limits",
        "spec.optimization.mode",
        "spec.template.metadata",
        "spec.template.metadata.labels",
        "spec.template.metadata.annotations",
    }
