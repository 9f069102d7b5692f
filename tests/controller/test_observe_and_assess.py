"""Which Pods are ours and what they are; which budget a spec gets."""

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
from kvscaler.models import catalogue
from kvscaler.scaling import ReplicaPhase
from kvscaler.traffic import AbsenceReason, Absent, Present
from kvscaler_api.reasons import Reason
from kvscaler_api.service import InferenceService
from kvscaler_api.status_budget import FactsSource
from kvscaler_operator.assess import Assessment, assess
from kvscaler_operator.cache import ObjectCache
from kvscaler_operator.children.intent import Intent
from kvscaler_operator.memory import ServiceMemory
from kvscaler_operator.observe import Fleet, observe_fleet
from kvscaler_operator.resources import DEPLOYMENTS, PODS, REPLICA_SETS, Object
from kvscaler_operator.signals import SignalPath, SignalStore

from tests.controller.sidecars import make_state
from tests.controller.virtual_time import run
from tests.controller.world import service_object

LABEL = "kvscaler.io/service-uid"


def made(name: str, owner: str | None, **fields: Any) -> Object:
    metadata: Object = {
        "name": name,
        "namespace": "ns",
        "uid": f"uid-{name}",
        "resourceVersion": "5",
        "labels": {LABEL: "uid-service"},
        "creationTimestamp": "2026-01-01T00:00:00Z",
        **fields.pop("metadata", {}),
    }
    if owner:
        metadata["ownerReferences"] = [{"uid": owner, "controller": True}]
    return {"metadata": metadata, **fields}


def pod(name: str, owner: str = "uid-rs", **fields: Any) -> Object:
    fields.setdefault("status", {"phase": "Running", "podIP": "10.0.0.1"})
    return made(name, owner, **fields)


def ready(status: str = "True") -> Object:
    return {"type": "Ready", "status": status, "lastTransitionTime": "2026-01-01T00:01:00Z"}


def fleet_of(*pods: Object, status: Object | None = None, sets: tuple[str, ...] = ("rs",)) -> Fleet:
    async def scenario() -> Fleet:
        caches = {r: ObjectCache(r, LABEL) for r in (DEPLOYMENTS, REPLICA_SETS, PODS)}
        observed = {"observedGeneration": 1, "replicas": len(pods), "updatedReplicas": len(pods)}
        deployment = made(
            "chat",
            "uid-service",
            spec={"replicas": 2},
            status=status or observed,
            metadata={"generation": 1},
        )
        caches[DEPLOYMENTS].observe(deployment)
        for name in sets:
            caches[REPLICA_SETS].observe(made(name, "uid-chat"))
        caches[REPLICA_SETS].observe(made("foreign-rs", "uid-other"))
        for each in pods:
            caches[PODS].observe(each)
        await asyncio.sleep(0)
        return observe_fleet(caches, "uid-service", lambda d: int(d["spec"]["replicas"]))

    return run(scenario())


def test_pods_are_ours_by_their_chain_of_owners_only() -> None:
    fleet = fleet_of(
        pod("ours"),
        pod("orphan", owner=""),
        pod("stranger", owner="uid-foreign-rs"),
        pod("direct", owner="uid-chat"),
        pod("finished", status={"phase": "Failed"}),
    )
    assert [r.name for r in fleet.replicas] == ["ours"]
    assert fleet.replica_count == 2


@pytest.mark.parametrize(
    ("fields", "phase", "complaint"),
    [
        ({"status": {"conditions": [ready()]}}, ReplicaPhase.READY, ""),
        ({"status": {"conditions": [ready("False")]}}, ReplicaPhase.WARMING, ""),
        ({"status": {}}, ReplicaPhase.WARMING, ""),
        (
            {"status": {"conditions": [{"type": "PodScheduled", "status": "False",
                                        "reason": "Unschedulable", "message": "0/3 nodes"}]}},
            ReplicaPhase.UNSCHEDULABLE, "0/3 nodes",
        ),
        (
            {"status": {"containerStatuses": [{"name": "engine", "state": {"waiting": {
                "reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {
                    "message": "memory limit below the budget"}}}]}},
            ReplicaPhase.CRASH_LOOPING, "engine: CrashLoopBackOff: memory limit below the budget",
        ),
        (
            {"status": {"containerStatuses": [{"name": "engine", "state": {"waiting": {
                "reason": "ErrImageNeverPull", "message": "no such image"}}}]}},
            ReplicaPhase.CRASH_LOOPING, "engine: ErrImageNeverPull: no such image",
        ),
        (
            {"metadata": {"deletionTimestamp": "2026-01-01T00:02:00Z"},
             "status": {"conditions": [ready()]}},
            ReplicaPhase.TERMINATING, "",
        ),
        (
            {"metadata": {"annotations": {"kvscaler.io/drain": "{}"}},
             "status": {"conditions": [ready()]}},
            ReplicaPhase.DRAINING, "",
        ),
    ],
)  # fmt: skip
def test_a_pod_has_one_phase(fields: Object, phase: ReplicaPhase, complaint: str) -> None:
    (replica,) = fleet_of(pod("p", **fields)).replicas
    assert (replica.phase, replica.complaint) == (phase, complaint)


def test_terminating_and_draining_pods_are_not_ready_ones() -> None:
    fleet = fleet_of(
        pod("a", status={"conditions": [ready()]}),
        pod("b", metadata={"annotations": {"kvscaler.io/drain": "{}"}},
            status={"conditions": [ready()]}),
        pod("c", metadata={"deletionTimestamp": "2026-01-01T00:02:00Z"}),
    )  # fmt: skip
    assert (fleet.existing, fleet.ready) == (2, 1)


def test_a_rollout_is_seen_and_a_change_of_replicas_is_none() -> None:
    two = (pod("a"), pod("b"))
    updating = {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 1}
    assert fleet_of(*two, status=updating).rollout_in_progress
    unseen = {"observedGeneration": 0, "replicas": 2, "updatedReplicas": 2}
    assert not fleet_of(*two, status=unseen).rollout_in_progress
    mixed = (pod("a"), pod("b", owner="uid-rs-2"))
    assert fleet_of(*mixed, status=unseen, sets=("rs", "rs-2")).rollout_in_progress


def assessed(reported: Any = None, compute_dtype: str | None = None, **spec: Any) -> Assessment:
    obj = service_object("ns", **spec)
    return assess(InferenceService.from_wire(obj).spec, reported, compute_dtype)


def test_a_model_of_the_catalogue_on_a_cpu_has_the_containers_memory() -> None:
    found = assessed()
    assert found.memory_bytes == 2 << 30
    assert (found.source, found.model_name) == (FactsSource.CATALOGUE, "smollm2-135m")
    assert found.budget is not None and found.budget.fit.fits
    assert found.obstacle is None


def test_the_budget_follows_what_replicas_compute_in() -> None:
    wide, narrow = assessed().budget, assessed(compute_dtype="bfloat16").budget
    assert wide is not None and narrow is not None
    assert narrow.line("weights").bytes * 2 == wide.line("weights").bytes
    assert narrow.blocks > wide.blocks
    # What they were told to compute in needs no replica that says so.
    for args, same in ((["--compute-dtype=bfloat16"], narrow), (["--compute-dtype=Auto"], wide)):
        assert assessed(engine={"args": args}).budget == same


def test_an_unknown_model_awaits_a_replica_and_then_uses_what_it_read() -> None:
    model = {"uri": "builtin://mystery"}
    waiting = assessed(model=model)
    assert waiting.budget is None and waiting.obstacle is None
    assert waiting.awaiting is not None
    assert waiting.awaiting.reason is Reason.AWAITING_MODEL_FACTS
    facts = catalogue.find("smollm2-135m").architecture.facts
    found = assessed(facts, model=model)
    assert found.source is FactsSource.REPLICA
    assert found.budget is not None and found.budget.fit.fits


def test_facts_that_are_not_understood_are_an_obstacle() -> None:
    found = assessed({"model_type": "mystery"}, model={"uri": "builtin://mystery"})
    assert found.obstacle is not None
    assert found.obstacle.reason is Reason.ARCHITECTURE_NOT_UNDERSTOOD


def test_a_named_card_brings_its_own_memory() -> None:
    found = assessed(accelerator={"name": "nvidia-l40s", "resourceName": "nvidia.com/gpu"})
    assert found.memory_bytes is not None and found.memory_bytes > 40 << 30


INLINE = {
    "weights": "16Gi", "hiddenSize": 4096, "attentionHeads": 32, "intermediateSize": 14336,
    "vocabularySize": 128256, "maxContextTokens": 131072,
}  # fmt: skip
H100 = {"name": "nvidia-h100-80gb-hbm3", "resourceName": "nvidia.com/gpu"}


def vllm(image: str, *layers: Object) -> Assessment:
    model = {"uri": "builtin://large", "architecture": {**INLINE, "layers": list(layers)}}
    return assessed(
        model=model, accelerator=H100, engine={"type": "VLLM", "image": image}, template=None
    )


def test_the_tag_of_an_image_tells_the_engines_version() -> None:
    full = {"kind": "Full", "count": 32, "kvHeads": 8, "headDim": 128}
    sorting = vllm("docker.io/vllm/vllm-openai:v0.11.0", full).budget
    newer = vllm("registry:5000/vllm/vllm-openai:v0.22.1", full).budget
    untold = vllm("vllm/vllm-openai@sha256:0123", full).budget
    assert sorting is not None and newer is not None and untold is not None
    # The sampler of 0.11 sorts its logits, at 39 bytes each instead of 14.
    assert sorting.line("activations").bytes > 2 * newer.line("activations").bytes
    assert untold.line("cuda graphs").bytes > 0


def test_inline_layers_of_every_kind_keep_what_they_say() -> None:
    found = vllm(
        "vllm/vllm-openai:v0.20.0",
        {"kind": "Full", "count": 8, "kvHeads": 8, "headDim": 128},
        {"kind": "Sliding", "count": 24, "kvHeads": 8, "headDim": 128, "windowTokens": 1024},
    )
    assert found.budget is not None
    assert [(g.kind.value, g.layers) for g in found.budget.layout.groups] == [
        ("full", 8), ("sliding", 8), ("sliding", 8), ("sliding", 8),
    ]  # fmt: skip
    latent = vllm("vllm:v0.20.0", {"kind": "MLA", "count": 61, "latentDim": 576}).budget
    assert latent is not None and latent.block_bytes == 61 * 576 * 2 * 16
    state = vllm(
        "vllm:v0.20.0",
        {"kind": "Full", "count": 8, "kvHeads": 8, "headDim": 128},
        {"kind": "Recurrent", "count": 8, "state": "2Mi"},
    ).budget
    assert state is not None and state.block_tokens == (2 << 20) // 4096


def test_what_is_remembered_of_pods_and_services_leaves_with_them() -> None:
    memory = ServiceMemory()
    warming = fleet_of(pod("a", status={"phase": "Pending"}), pod("b", status={"phase": "Pending"}))
    memory.learn(warming.replicas, ())
    memory.learn(fleet_of(pod("b", status={"phase": "Pending"})).replicas, ())
    assert memory._warming == {"uid-b"}
    signals = SignalStore([SignalPath.DIRECT])
    silent = Absent(AbsenceReason.MISSING, "direct")
    for service in ("here", "gone"):
        signals.forget(service)
        signals.observe(service, "pod", SignalPath.DIRECT, silent)  # its answer was on the way
    signals.keep_services({"here"})
    assert signals._services.keys() == {"here"}


def test_a_clock_that_is_set_back_freezes_no_state() -> None:
    signals = SignalStore([SignalPath.DIRECT], max_age_seconds=20.0)

    def answer(pod: str, now: float) -> bool:
        state = make_state("service", pod, pod, started_at=1.0, observed_at=now)
        return signals.observe("service", pod, SignalPath.DIRECT, Present(state, "direct", now))

    for pod_uid in ("a", "b"):
        answer(pod_uid, 10_000.0)
    assert not answer("a", 9_990.0), "a little jitter is an old answer"
    assert answer("a", 6_400.0)
    assert answer("b", 6_400.5)
    for pod_uid in ("a", "b"):
        found = signals.state("service", pod_uid, 6_401.0)
        assert isinstance(found, Present)
        assert found.time < 6_401.0
        gone_silent = signals.state("service", pod_uid, 6_430.0)
        assert isinstance(gone_silent, Absent)
        assert gone_silent.reason is AbsenceReason.STALE
    window = signals.window("service", ["a", "b"], 6_401.0)
    assert isinstance(window, Present)
    assert window.time < 6_401.0


def test_what_follows_from_an_object_is_made_once_for_each_version_of_it() -> None:
    memory = ServiceMemory()
    obj = service_object("ns")
    obj["metadata"] |= {"uid": "uid-1", "generation": 1}
    first = memory.text(obj)
    assert first.service is not None and first.fault is None
    assert memory.text(obj) is first
    budget = memory.assess(first.service.spec, None)
    assert memory.assess(first.service.spec, None) is budget
    memory.compute_dtype = "bfloat16"
    assert memory.assess(first.service.spec, None) is not budget
    changed = copy.deepcopy(obj)
    changed["spec"]["scaling"]["maxReplicas"] = 7
    second = memory.text(changed)
    assert second.service is not None and second.service.spec.scaling.max_replicas == 7


def test_children_are_the_same_documents_until_the_intent_changes() -> None:
    memory = ServiceMemory()
    obj = service_object("ns")
    obj["metadata"]["uid"] = "uid-1"
    service = memory.text(obj).service
    assert service is not None
    intent = Intent(service, "image:1", "Never", 2 << 30, {"k.pem": "PEM"})
    documents = memory.children(intent)
    assert memory.children(replace(intent)) is documents
    other = memory.children(replace(intent, image="image:2"))
    images = [
        document["spec"]["template"]["spec"]["containers"][0]["image"]
        for document in (documents[-1], other[-1])
    ]
    assert images == ["image:1", "image:2"]
