"""The children of a service and the size of its fleet: what a pass writes besides status."""

from collections.abc import Sequence

from kvscaler.scaling import Decision
from kvscaler_api.reasons import EventReason

from kvscaler_operator.drain import Outcome
from kvscaler_operator.observe import Fleet
from kvscaler_operator.report import Report
from kvscaler_operator.resources import DEPLOYMENTS, Object
from kvscaler_operator.writers import Writers


async def ensure_children(
    writers: Writers, owner: Object, documents: Sequence[Object], create_replicas: int
) -> float | None:
    """Bring all children to what their documents say. Nothing is made while any name is taken.

    Returns the seconds after which to look again, when a restore was put off.
    """
    live = [await writers.children.find(owner, document) for document in documents]
    waits = []
    for document, existing in zip(documents, live, strict=True):
        replicas = create_replicas if document["kind"] == DEPLOYMENTS.kind else None
        _, wait = await writers.children.ensure(owner, document, existing, replicas)
        waits.append(wait)
    return min((w for w in waits if w is not None), default=None)


async def write_decision(
    writers: Writers, owner: Object, decision: Decision, spec_replicas: int
) -> int:
    """Write a Managed decision through our object's own scale subresource; returns the replicas
    that it asks for now."""
    wanted = decision.desired_replicas
    if wanted == spec_replicas:
        return spec_replicas
    await writers.scales.write_service(owner, wanted)
    up = wanted > spec_replicas
    reason = EventReason.SCALED_UP if up else EventReason.SCALED_DOWN
    note = (
        f"{spec_replicas} -> {wanted} replicas ({decision.binding_constraint.value}): "
        f"{decision.message}"
    )
    writers.events.record(owner, reason, note, action="Scale")
    return wanted


async def follow_replicas(
    writers: Writers,
    report: Report,
    target: int,
    drain_timeout_seconds: float,
    now: float,
) -> float | None:
    """Bring the Deployment to `target` replicas: up at once, down through the drain."""
    fleet = report.fleet
    if fleet.deployment is None:
        return None
    victims = report.decision.victims if report.decision is not None else ()
    owner_uid = report.obj["metadata"]["uid"]
    outcome = await writers.drainer.step(
        owner_uid, fleet, target, victims, report.states, drain_timeout_seconds, now
    )
    if outcome.replicas != fleet.replica_count:
        await writers.scales.write_deployment(fleet.deployment, outcome.replicas)
    _tell(writers, report.obj, fleet, outcome)
    return outcome.look_again_seconds


def _tell(writers: Writers, owner: Object, fleet: Fleet, outcome: Outcome) -> None:
    for pod in outcome.started:
        writers.events.record(owner, EventReason.DRAIN_STARTED, f"{pod} finishes what it accepted")
    if outcome.replicas < fleet.replica_count:
        for pod in outcome.finished:
            writers.events.record(owner, EventReason.DRAIN_FINISHED, f"{pod} is empty and goes")
        for pod in outcome.timed_out:
            note = f"{pod} still has requests at the end of drainTimeout; its grace period follows"
            writers.events.record(owner, EventReason.DRAIN_TIMED_OUT, note, warning=True)
    for pod in outcome.cancelled:
        note = f"{pod} serves again: demand is back"
        writers.events.record(owner, EventReason.DRAIN_CANCELLED, note)
