"""A service of modelled replicas: the card's budget, no demand on the node, and said in status."""

from typing import Any

import pytest
from kvscaler.budget import (
    AdmissionPolicy,
    EngineSettings,
    admission_limits,
    compute_budget,
    profile_for,
)
from kvscaler.hardware import find
from kvscaler.models import catalogue
from kvscaler.protocol.state import ExecutorReport, ReplicaState
from kvscaler.traffic import AbsenceReason, Absent, Present, Signal
from kvscaler_api.reasons import Reason
from kvscaler_api.service import InferenceService
from kvscaler_operator.assess import Assessment, assess
from kvscaler_operator.children.deployment import pod_template
from kvscaler_operator.children.intent import Intent
from kvscaler_operator.decision import Calibration
from kvscaler_operator.status import budget_status, executor_status
from kvscaler_operator.validate import read
from kvscaler_sidecar.config import parse_arguments
from kvscaler_sidecar.start import plan_start

from tests.controller.sidecars import make_state
from tests.controller.world import service_object

H100 = "nvidia-h100-80gb-hbm3"
LLAMA = "hf://meta-llama/Llama-3.1-8B-Instruct"


def service(accelerator: str = H100, **spec: Any) -> InferenceService:
    values: dict[str, Any] = {
        "model": {"uri": LLAMA, "maxContextTokens": 8192},
        "engine": {"args": ["--executor=Modelled", "--time-scale=2"]},
        "accelerator": {"name": accelerator, "resourceName": "nvidia.com/gpu"},
    }
    found, fault = read(service_object("ns", "chat", **{**values, **spec}))
    assert found is not None and fault is None, fault
    return found


def assessed(one: InferenceService, dtype: str | None = None) -> Assessment:
    return assess(one.spec, None, dtype)


def modelled_state(name: str, scale: float = 2.0) -> ReplicaState:
    report = ExecutorReport(
        type="Modelled", device=H100, compute_dtype="bfloat16", kv_dtype="bfloat16",
        time_scale=scale,
    )  # fmt: skip
    return make_state("s", name, name, executor=report)


def test_the_budget_is_the_cards_whatever_memory_the_pod_has() -> None:
    found = assessed(service())
    card = find(H100)
    assert found.obstacle is None and found.budget is not None
    assert found.memory_bytes == card.memory_bytes
    assert found.budget == compute_budget(
        catalogue.find(LLAMA).architecture,
        card,
        profile_for("Kvscaler", card),
        EngineSettings(memory_utilization_percent=90, max_context_tokens=8192, block_tokens=16),
    )
    # What a replica reports of its number format changes nothing.
    assert assessed(service(), "bfloat16").budget == found.budget


def test_operator_and_replica_have_the_same_budget() -> None:
    one = service()
    found = assessed(one)
    assert found.budget is not None and found.memory_bytes is not None
    intent = Intent(one, "image:1", "Never", found.memory_bytes, {})
    (container,) = pod_template(intent)["spec"]["containers"]
    options = [
        f"--{e['name'].removeprefix('KVSCALER_').lower().replace('_', '-')}={e['value']}"
        for e in container["env"]
        if e.get("value")
    ]
    settings = parse_arguments([*container["args"][1:], *options])
    plan = plan_start(settings, settings.compute_dtype)
    ours, theirs = found.budget, plan.budget
    assert (theirs.lines, theirs.blocks, theirs.kv_bytes) == (
        ours.lines,
        ours.blocks,
        ours.kv_bytes,
    )
    assert theirs.max_context_tokens == ours.max_context_tokens
    assert (
        plan.limits(theirs.blocks).content_hash
        == admission_limits(ours, AdmissionPolicy()).content_hash
    )


def test_no_accelerator_is_demanded_from_the_scheduler() -> None:
    def limits(one: InferenceService) -> Any:
        (container,) = pod_template(Intent(one, "image:1", "Never", 1, {}))["spec"]["containers"]
        return container["resources"]["limits"]

    assert "nvidia.com/gpu" not in limits(service())
    real = service(model={"uri": "builtin://smollm2-135m"}, engine={"args": []})
    assert limits(real)["nvidia.com/gpu"] == "1"


def test_a_device_whose_step_times_are_not_known_is_an_obstacle() -> None:
    found = assessed(service("cpu"))
    assert found.obstacle is not None
    assert found.obstacle.reason is Reason.UNKNOWN_ACCELERATOR
    assert "Modelled can't stand for it: accelerator cpu has no stated" in found.obstacle.message


def test_status_names_a_modelled_replica_before_all_others() -> None:
    torch = make_state("s", "a", "a")
    states: list[Signal[ReplicaState]] = [
        Present(torch, "direct", 0.0),
        Absent(AbsenceReason.MISSING, "direct", "no answer"),
    ]
    shown = executor_status(states)
    assert shown is not None
    assert shown.to_wire() == {"type": "Torch", "device": "cpu", "timeScale": "1"}
    for order in (1, -1):
        mixed = [*states, Present(modelled_state("b"), "direct", 0.0)][::order]
        shown = executor_status(mixed)
        assert shown is not None
        assert shown.to_wire() == {"type": "Modelled", "device": H100, "timeScale": "2"}
    assert executor_status(states[1:]) is None


@pytest.mark.parametrize("modelled", [True, False])
def test_memory_that_nobody_allocated_is_not_called_observed(modelled: bool) -> None:
    budget = assessed(service()).budget
    assert budget is not None
    state = modelled_state("a") if modelled else make_state("s", "a", "a")
    assert state.capacity is not None
    blocks = state.capacity.kv_blocks
    status = budget_status(budget, Calibration(blocks, blocks), {"a": Present(state, "x", 0.0)})
    observed = {line.name: line.observed_bytes for line in status.lines}
    assert (observed["weights"] is None) is modelled
    assert (observed["kv pool"] is None) is modelled
    assert status.observed_blocks == blocks
