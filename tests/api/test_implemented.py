"""Whatever is asked for beyond this version is said; nothing is silently ignored."""

from typing import Any

import pytest
from kvscaler_api.crd import field_paths
from kvscaler_api.implemented import LIVE, LIVE_VALUES, not_implemented
from kvscaler_api.service import read_service

ARCHITECTURE = {
    "layers": [{"kind": "Full", "count": 30, "kvHeads": 3, "headDim": 64}],
    "weights": "257Mi",
    "hiddenSize": 576,
    "attentionHeads": 9,
    "intermediateSize": 1536,
    "vocabularySize": 49152,
    "maxContextTokens": 2048,
}
SLIDING = {"kind": "Sliding", "count": 1, "kvHeads": 3, "headDim": 64, "windowTokens": 8}
OTHER_ENGINE = {"type": "VLLM"}
ROUTER = {"mode": "Router"}

ASKED = [
    ({"model": {"uri": "hf://a/b"}}, ["spec.model.uri"]),
    ({"model": {"uri": "s3://bucket/b"}}, ["spec.model.uri"]),
    ({"model": {"revision": "v2"}}, ["spec.model.revision"]),
    (
        {"model": {"credentialsSecretRef": {"name": "token"}}},
        ["spec.model.credentialsSecretRef"],
    ),
    (
        {"model": {"architecture": {**ARCHITECTURE, "layers": [SLIDING]}}},
        ["spec.model.architecture.layers"],
    ),
    ({"engine": OTHER_ENGINE}, ["spec.engine.type"]),
    (
        {"engine": {**OTHER_ENGINE, "tensorParallel": 2, "pipelineParallel": 2}},
        ["spec.engine.pipelineParallel", "spec.engine.tensorParallel", "spec.engine.type"],
    ),
    ({"accelerator": {"name": None, "memory": "80Gi"}}, ["spec.accelerator.memory"]),
    (
        {"accelerator": {"name": None, "memory": "80Gi", "bandwidth": "1T"}},
        ["spec.accelerator.bandwidth", "spec.accelerator.memory"],
    ),
    ({"cache": {"dtype": "FP8"}}, ["spec.cache.dtype"]),
    ({"cache": {"dtype": "Float32"}}, ["spec.cache.dtype"]),
    ({"admission": {"mode": "Observe"}}, ["spec.admission.mode"]),
    ({"admission": {"mode": "Off"}}, ["spec.admission.mode"]),
    ({"routing": ROUTER}, ["spec.routing.mode"]),
    ({"routing": {"mode": "Gateway"}}, ["spec.routing.mode"]),
    (
        {"routing": ROUTER, "scaling": {"minReplicas": 0}},
        ["spec.routing.mode", "spec.scaling.minReplicas"],
    ),
    ({"routing": {"router": {"replicas": 2}}}, ["spec.routing.router.replicas"]),
    (
        {"routing": {"router": {"resources": {"limits": {"cpu": "1"}, "requests": {"cpu": 1}}}}},
        ["spec.routing.router.resources.limits", "spec.routing.router.resources.requests"],
    ),
    ({"routing": {"trustedHeaders": ["x-tenant"]}}, ["spec.routing.trustedHeaders"]),
    ({"optimization": {"mode": "Advise"}}, ["spec.optimization.mode"]),
    ({"optimization": {"allow": ["KVOffload"]}}, ["spec.optimization.allow"]),
    ({"signals": {"prometheus": "thanos"}}, ["spec.signals.prometheus"]),
    (
        {"targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "x"}},
        ["spec.targetRef"],
    ),
]


@pytest.mark.parametrize(("patch", "paths"), ASKED, ids=[",".join(paths) for _, paths in ASKED])
def test_what_is_not_acted_on_is_named(changed: Any, patch: Any, paths: list[str]) -> None:
    assert list(not_implemented(read_service(changed(patch)).spec)) == paths


def test_defaults_and_live_fields_ask_for_nothing_more(changed: Any) -> None:
    live = {
        "replicas": 3,
        "model": {
            "servedNames": ["a"],
            "maxContextTokens": 2048,
            "architecture": ARCHITECTURE,
        },
        "engine": {"image": "docker.io/a/b:c", "args": ["--threads=1"]}
        | {"memoryUtilizationPercent": 80},
        "accelerator": {"name": "nvidia-l40s", "resourceName": "nvidia.com/gpu"},
        "cache": {"blockTokens": 32, "prefixCaching": "Disabled", "watermarkPercent": 0},
        "objectives": {"timeToFirstToken": "9s", "timePerOutputToken": "9s", "attainment": "50%"},
        "scaling": {
            "mode": "External",
            "minReplicas": 2,
            "scaleDown": {"stabilizationWindow": "1s", "drainTimeout": "1s", "toZeroAfter": "1s"},
            "onMissingSignals": {"for": "1m"},
        },
        "admission": {"charge": "PromptOnly", "queue": {"maxRequests": 1, "maxWait": "1s"}},
        "template": {"spec": {"x": 1}},
    }
    assert not_implemented(read_service(changed({})).spec) == ()
    assert not_implemented(read_service(changed(live)).spec) == ()


def test_every_field_is_live_or_tested_to_be_named() -> None:
    named = {path for _, paths in ASKED for path in paths} | {f"spec.{path}" for path in LIVE}
    fields = [path for path in field_paths() if path.startswith("spec.")]
    leaves = [p for p in fields if not any(other.startswith(f"{p}.") for other in fields)]
    unheard = [p for p in leaves if not any(f"{p}.".startswith(f"{name}.") for name in named)]
    assert unheard == []
    assert {f"spec.{path}" for path in [*LIVE, *LIVE_VALUES]} <= set(fields)
