"""The committed CRD on a real API server: what it accepts, refuses, fills in and shows."""

import json
from typing import Any

import pytest
from kvscaler_api.crd import CRD_NAME, missing_fields
from kvscaler_api.service import read_service
from kvscaler_api.size import MAX_SPEC_BYTES, size_fault

pytestmark = pytest.mark.apiserver

NAMESPACE = "api-tests"

LLAMA = {
    "layers": [{"kind": "Full", "count": 32, "kvHeads": 8, "headDim": 128}],
    "weights": "15Gi",
    "hiddenSize": 4096,
    "attentionHeads": 32,
    "intermediateSize": 14336,
    "vocabularySize": 128256,
    "maxContextTokens": 131072,
}


def layers(**group: Any) -> dict[str, Any]:
    return {"model": {"architecture": {**LLAMA, "layers": [{"count": 4, **group}]}}}


TARGET = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "my-vllm"}
OTHER_ENGINE = {"type": "VLLM", "image": "docker.io/vllm/vllm-openai:v0.11"}
BY_MEMORY = {"name": None, "memory": "80Gi"}

RULES = [
    # (name of the rule, accepted patches of the spec, refused patches, words of the refusal)
    (
        "replica bounds",
        [{"scaling": {"minReplicas": 5}}, {"scaling": {"minReplicas": 1, "maxReplicas": 1}}],
        [{"scaling": {"minReplicas": 6}}],
        "spec.scaling: Invalid value: minReplicas must not be greater than maxReplicas",
    ),
    (
        "zero needs a router",
        [{"scaling": {"minReplicas": 0}, "routing": {"mode": "Router"}}],
        [{"scaling": {"minReplicas": 0}}],
        "scaling.minReplicas 0 needs routing.mode Router",
    ),
    (
        "own engine on one accelerator",
        [{"engine": {"tensorParallel": 1}}, {"engine": {**OTHER_ENGINE, "tensorParallel": 4}}],
        [{"engine": {"tensorParallel": 2}}, {"engine": {"pipelineParallel": 2}}],
        "the engine Kvscaler runs on one accelerator",
    ),
    (
        "target excludes template",
        [{"targetRef": TARGET}, {"template": {"spec": {}}}],
        [
            {"targetRef": TARGET, "template": {"spec": {}}},
            {"targetRef": TARGET, "engine": {"image": "docker.io/a/b:c"}},
            {"targetRef": TARGET, "engine": {"args": ["--x"]}},
        ],
        "targetRef scales what already runs: it excludes template",
    ),
    (
        "accelerator by name or by figures",
        [{"accelerator": {"name": "nvidia-l40s"}}, {"accelerator": BY_MEMORY}],
        [{"accelerator": {"memory": "80Gi"}}, {"accelerator": {"name": None}}],
        "set exactly one of name and memory",
    ),
    (
        "bandwidth goes with memory",
        [{"accelerator": {**BY_MEMORY, "bandwidth": "3350G"}}],
        [{"accelerator": {"bandwidth": "3350G"}}],
        "bandwidth goes with memory",
    ),
    (
        "quantities are positive",
        [
            {"accelerator": {"name": None, "memory": 85899345920}},
            {"accelerator": {"name": None, "memory": "1e9"}},
        ],
        [
            {"accelerator": {"name": None, "memory": "0"}},
            {"accelerator": {"name": None, "memory": "0.0Gi"}},
            {"accelerator": {**BY_MEMORY, "bandwidth": "0G"}},
            {"model": {"architecture": {**LLAMA, "weights": "0"}}},
            layers(kind="Recurrent", state="0Mi"),
        ],
        "must be greater than 0",
    ),
    (
        "model source",
        [
            {"model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"}},
            {"model": {"uri": "pvc://weights/llama/8b"}},
            {"model": {"uri": "s3://bucket/models/llama"}},
        ],
        [
            {"model": {"uri": "http://example.org/model"}},
            {"model": {"uri": "/etc"}},
            {"model": {"uri": "pvc://weights/../other"}},
            {"model": {"uri": "pvc://weights/.."}},
            {"model": {"uri": "hf://only-a-name"}},
        ],
        "must be hf://owner/name, builtin://name, pvc://claim/path or s3://bucket/path",
    ),
    (
        "full and sliding layers",
        [layers(kind="Full", kvHeads=8, headDim=64)],
        [layers(kind="Full", kvHeads=8), layers(kind="Sliding", headDim=8, windowTokens=9)],
        "layers of kind Full or Sliding need kvHeads and headDim",
    ),
    (
        "sliding layers",
        [layers(kind="Sliding", kvHeads=8, headDim=64, windowTokens=4096)],
        [layers(kind="Sliding", kvHeads=8, headDim=64)],
        "layers of kind Sliding need windowTokens",
    ),
    (
        "compressed layers",
        [layers(kind="MLA", latentDim=576)],
        [layers(kind="MLA")],
        "layers of kind MLA need latentDim",
    ),
    (
        "recurrent layers",
        [layers(kind="Recurrent", state="2Mi")],
        [layers(kind="Recurrent")],
        "layers of kind Recurrent need state",
    ),
    (
        "block size",
        [{"cache": {"blockTokens": 1}}, {"cache": {"blockTokens": 256}}],
        [{"cache": {"blockTokens": 24}}],
        "spec.cache.blockTokens: Invalid value: 24: must be a power of two up to 256",
    ),
    (
        "time to first token",
        [{"objectives": {"timeToFirstToken": "1h"}}],
        [{"objectives": {"timeToFirstToken": t}} for t in ("0s", "1h1ms")],
        "spec.objectives.timeToFirstToken: Invalid value: ",
    ),
    (
        "time per output token",
        [{"objectives": {"timePerOutputToken": "0.5s"}}],
        [{"objectives": {"timePerOutputToken": "0ms"}}],
        "must be from 1ms to 1m",
    ),
    (
        "attainment",
        [{"objectives": {"attainment": a}} for a in ("99.9%", "100%", "0.001%")],
        [{"objectives": {"attainment": a}} for a in ("0%", "0.000%")],
        "must be greater than 0%",
    ),
    (
        "stabilization window",
        [{"scaling": {"scaleDown": {"stabilizationWindow": "0s"}}}],
        [{"scaling": {"scaleDown": {"stabilizationWindow": "2h"}}}],
        "must be from 0s to 1h",
    ),
    (
        "drain timeout",
        [{"scaling": {"scaleDown": {"drainTimeout": "1h30m"}}}],
        [{"scaling": {"scaleDown": {"drainTimeout": t}}} for t in ("0s", "25h")],
        "must be from 1s to 24h",
    ),
    (
        "time to zero",
        [{"scaling": {"scaleDown": {"toZeroAfter": "1m"}}}],
        [{"scaling": {"scaleDown": {"toZeroAfter": "0s"}}}],
        "must be from 1s to 168h",
    ),
    (
        "hold on missing signals",
        [{"scaling": {"onMissingSignals": {"for": "1h"}}}],
        [{"scaling": {"onMissingSignals": {"for": "5s"}}}],
        "must be from 10s to 24h",
    ),
    (
        "wait for admission",
        [{"admission": {"queue": {"maxWait": "1ms"}}}],
        [{"admission": {"queue": {"maxWait": "0s"}}}],
        "must be from 1ms to 1h",
    ),
]


@pytest.mark.parametrize(
    ("accepted", "refused", "words"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES]
)
def test_each_rule_accepts_and_refuses(
    api: Any, changed: Any, accepted: list[Any], refused: list[Any], words: str
) -> None:
    for patch in accepted:
        assert api.refusal(changed(patch)) is None
        read_service(changed(patch))
    for patch in refused:
        assert words in (api.refusal(changed(patch)) or "accepted")


def test_every_rule_of_the_schema_was_seen_to_refuse(api: Any, changed: Any) -> None:
    answer = json.loads(api.kubectl("get", "crd", CRD_NAME, "-o", "json").stdout)
    assert missing_fields(answer) == ()
    schema = answer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    refusals = [api.refusal(changed(patch)) for rule in RULES for patch in rule[2]]
    unseen = {
        (path, message)
        for path, message in _rules(schema, "spec")
        if not any(f"{path}: Invalid" in text and message in text for text in refusals)
    }
    # A rule about a change, tested below as such.
    assert unseen == {("spec", "targetRef is immutable: make another InferenceService instead")}


def _rules(node: dict[str, Any], path: str) -> list[tuple[str, str]]:
    found = [(path, rule["message"]) for rule in node.get("x-kubernetes-validations", ())]
    for name, child in node.get("properties", {}).items():
        found += _rules(child, f"{path}.{name}")
    return found + (_rules(node["items"], f"{path}[0]") if "items" in node else [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a" * 50, None),
        ("a" * 51, "metadata.name must have at most 50 characters"),
        ("a-1", None),
        ("1a", "metadata.name must start with a letter"),
        ("a.b", "metadata.name must start with a letter and hold only lower-case letters"),
    ],
)
def test_names_leave_room_for_children(
    api: Any, service: dict[str, Any], name: str, words: str | None
) -> None:
    service["metadata"]["name"] = name
    refusal = api.refusal(service)
    assert refusal is None if words is None else words in (refusal or "accepted")


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"replicas": -1}, "spec.replicas"),
        ({"scaling": {"minReplicas": -1}}, "spec.scaling.minReplicas"),
        ({"scaling": {"maxReplicas": 0}}, "spec.scaling.maxReplicas"),
        ({"scaling": {"mode": "Automatic"}}, "spec.scaling.mode"),
        ({"scaling": {"mode": None}}, "spec.scaling.mode"),
        ({"scaling": {"maxReplicas": "five"}}, "spec.scaling.maxReplicas"),
        (
            {"scaling": {"scaleDown": {"drainTimeout": "soon"}}},
            "spec.scaling.scaleDown.drainTimeout",
        ),
        (
            {"scaling": {"scaleDown": {"drainTimeout": "-5m"}}},
            "spec.scaling.scaleDown.drainTimeout",
        ),
        ({"scaling": {"scaleDown": {"drainTimeout": 300}}}, "spec.scaling.scaleDown.drainTimeout"),
        ({"model": {"maxContextTokens": -1}}, "spec.model.maxContextTokens"),
        ({"model": {"maxContextTokens": 1.5}}, "spec.model.maxContextTokens"),
        ({"model": {"servedNames": ["a", "a"]}}, "spec.model.servedNames"),
        ({"accelerator": {"name": None, "memory": -1}}, "spec.accelerator.memory"),
        ({"accelerator": {"name": None, "memory": "-80Gi"}}, "spec.accelerator.memory"),
        ({"engine": {"memoryUtilizationPercent": 100}}, "spec.engine.memoryUtilizationPercent"),
        ({"objectives": {"attainment": "101%"}}, "spec.objectives.attainment"),
        ({"objectives": {"attainment": "99"}}, "spec.objectives.attainment"),
        ({"admission": {"queue": {"maxRequests": 0}}}, "spec.admission.queue.maxRequests"),
        ({"cache": {"watermarkPercent": -1}}, "spec.cache.watermarkPercent"),
        ({"signals": {"prometheus": "http://evil"}}, "spec.signals.prometheus"),
        ({"optimization": {"mode": False}}, "spec.optimization.mode"),
        ({"model": None}, "spec.model"),
        ({"accelerator": None}, "spec.accelerator"),
    ],
)
def test_bad_values_are_refused_by_the_name_of_their_field(
    api: Any, changed: Any, patch: dict[str, Any], field: str
) -> None:
    assert field in (api.refusal(changed(patch)) or "accepted")


def test_a_misspelt_field_is_refused_when_asked_to_be_strict(api: Any, changed: Any) -> None:
    wrong = json.dumps(changed({"scaling": {"maxReplica": 3}}))
    done = api.kubectl("create", "--dry-run=server", "-f", "-", text=wrong)
    assert done.returncode == 1
    assert 'unknown field "spec.scaling.maxReplica"' in done.stderr


def test_the_server_fills_in_the_defaults_that_the_models_have(
    clean_api: Any, service: dict[str, Any]
) -> None:
    stored = clean_api.create(service)
    assert stored["spec"] == read_service(service).spec.to_wire()
    assert stored["spec"]["scaling"]["scaleDown"] == {
        "stabilizationWindow": "5m",
        "drainTimeout": "10m",
        "toZeroAfter": "15m",
    }
    assert stored["spec"]["replicas"] == 1
    assert stored["spec"]["objectives"]["attainment"] == "99%"
    assert "status" not in stored


def test_nested_defaults_are_filled_beside_a_given_field(clean_api: Any, changed: Any) -> None:
    stored = clean_api.create(changed({"scaling": {"scaleDown": {"stabilizationWindow": "45s"}}}))
    assert stored["spec"]["scaling"]["scaleDown"] == {
        "stabilizationWindow": "45s",
        "drainTimeout": "10m",
        "toZeroAfter": "15m",
    }


def test_the_target_cannot_be_changed_added_or_removed(clean_api: Any, changed: Any) -> None:
    words = "targetRef is immutable: make another InferenceService instead"
    clean_api.create(changed({"targetRef": TARGET}))
    assert clean_api.change_refusal("chat", {"replicas": 2}) is None
    assert words in clean_api.change_refusal("chat", {"targetRef": {"name": "other"}})
    assert words in clean_api.change_refusal("chat", {"targetRef": None})
    clean_api.delete_all()
    clean_api.create(changed({}))
    assert words in clean_api.change_refusal("chat", {"targetRef": TARGET})


def test_scale_reads_and_writes_replicas(clean_api: Any, service: dict[str, Any]) -> None:
    clean_api.create(service)
    selector = "kvscaler.io/service-uid=u,kvscaler.io/component=engine"
    clean_api.set_status("chat", {"replicas": 2, "selector": selector})
    done = clean_api.kubectl("scale", "kvis/chat", "--replicas=4", f"--namespace={NAMESPACE}")
    assert done.returncode == 0, done.stderr
    scale = clean_api.objects.get_namespaced_custom_object_scale(
        "kvscaler.io", "v1alpha1", NAMESPACE, "inferenceservices", "chat"
    )
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 2, "selector": selector}


def test_columns_tell_the_state_at_a_glance(clean_api: Any, service: dict[str, Any]) -> None:
    clean_api.create(service)
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "ReplicasReady",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    clean_api.set_status(
        "chat",
        {
            "replicas": 2,
            "desiredReplicas": 3,
            "conditions": [condition],
            "occupancy": {"kvPercent": 81},
            "decision": {
                "desiredReplicas": 3,
                "bindingConstraint": "Memory",
                "reason": "MoreMemoryNeeded",
                "time": "2026-01-01T00:00:00Z",
            },
        },
    )
    table = clean_api.kubectl("get", "kvis", f"--namespace={NAMESPACE}").stdout.splitlines()
    assert table[0].split() == [
        "NAME", "READY", "ENGINE", "REPLICAS", "DESIRED", "KV%", "BINDING", "AGE",
    ]  # fmt: skip
    assert table[1].split()[:7] == ["chat", "True", "Kvscaler", "2", "3", "81", "Memory"]
    wide = clean_api.kubectl("get", "kvscaler", "-o", "wide", f"--namespace={NAMESPACE}").stdout
    assert wide.splitlines()[1].split()[-1] == "ReplicasReady"


def test_explain_reads_well(api: Any) -> None:
    text = " ".join(api.kubectl("explain", "kvis.spec.scaling").stdout.split())
    assert "How many replicas there may be, who decides, and how they go away." in text
    assert "enum: Managed, Advisory, External Who writes spec.replicas." in text
    window = api.kubectl("explain", "kvis.spec.scaling.scaleDown.stabilizationWindow").stdout
    assert "Default: 5m." in " ".join(window.split())


def test_every_field_is_explained(api: Any) -> None:
    answer = json.loads(api.kubectl("get", "crd", CRD_NAME, "-o", "json").stdout)
    schema = answer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    bare = [
        path
        for part in ("spec", "status")
        for path, description in _descriptions(schema[part], part)
        if not description.rstrip().endswith(".")
    ]
    assert bare == []


def _descriptions(node: dict[str, Any], path: str) -> list[tuple[str, str]]:
    found = [(path, node.get("description", ""))]
    for name, child in node.get("properties", {}).items():
        found += _descriptions(child, f"{path}.{name}")
    for name, child in node.get("items", {}).get("properties", {}).items():
        found += _descriptions(child, f"{path}[].{name}")
    return found


def test_an_object_of_300_kib_is_stored_and_then_refused_in_words(
    clean_api: Any, changed: Any
) -> None:
    padding = [{"name": f"V{i}", "value": "x" * 1000} for i in range(300)]
    stored = clean_api.create(
        changed({"template": {"spec": {"containers": [{"name": "engine", "env": padding}]}}})
    )
    fault = size_fault(stored)
    assert fault is not None
    assert f"at most {MAX_SPEC_BYTES // 1024} KiB are handled" in fault
    assert "spec.template with 3" in fault


def test_an_object_beyond_the_servers_limit_is_refused_by_it(api: Any, changed: Any) -> None:
    blob = changed({"template": {"spec": {"x": "y" * 4_000_000}}})
    assert "large" in (api.refusal(blob) or "accepted")


def test_status_that_the_models_write_is_stored_whole(
    clean_api: Any, service: dict[str, Any]
) -> None:
    stored = clean_api.create(service)
    status = {
        "observedGeneration": 1,
        "budget": {
            "lines": [{"name": "weights", "predicted": "257Mi", "observed": "269484032"}],
            "deviationPercent": "-1.25",
        },
        "traffic": {"requestsPerSecond": "0.3333", "attainment": "98.5%"},
        "limits": {"hash": "00ff", "kvBlocks": 512, "queueBytes": "16Mi"},
        "recommendations": [],
        "conditions": [],
    }
    written = read_service({**stored, "status": status}).status.to_wire()
    assert clean_api.set_status("chat", written)["status"] == written
