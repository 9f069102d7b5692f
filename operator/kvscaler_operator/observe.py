"""What exists of a service in the cluster, read from the caches alone.

A serving Pod is ours by its chain of owners, by UID: Pod, ReplicaSet, our Deployment, our object.
Labels only narrow the search: anyone who may create a Pod can put our labels on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from kvscaler.scaling import FleetView, ReplicaPhase, ReplicaView
from kvscaler_api.metadata import DRAIN_ANNOTATION
from kvscaler_api.template import ENGINE_CONTAINER

from kvscaler_operator.cache import ObjectCache
from kvscaler_operator.resources import (
    DEPLOYMENTS,
    PODS,
    REPLICA_SETS,
    Object,
    Resource,
    controller_uid,
    name_of,
    uid_of,
)

Caches = Mapping[Resource, ObjectCache]

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"

TEMPLATE_HASH_LABEL = "pod-template-hash"

FAILING_REASONS = frozenset(
    {
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImagePull",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
"""Why a container waits, when waiting alone will not help."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One serving Pod, as Kubernetes sees it."""

    pod: Object
    phase: ReplicaPhase
    since: float
    revision: str
    """UID of its ReplicaSet."""
    complaint: str = ""
    """Why it is not well, in the words of the kubelet or scheduler."""

    @property
    def uid(self) -> str:
        """UID of the Pod."""
        return uid_of(self.pod)

    @property
    def name(self) -> str:
        """Name of the Pod."""
        return name_of(self.pod)

    @property
    def ip(self) -> str | None:
        """Address of the Pod, once it has one."""
        return (self.pod.get("status") or {}).get("podIP")

    @property
    def drain_record(self) -> str | None:
        """The record of a drain in progress, as JSON text."""
        return (self.pod["metadata"].get("annotations") or {}).get(DRAIN_ANNOTATION)

    @property
    def engine_started(self) -> bool | None:
        """Whether the engine runs and was ready once since it did; `None` before anyone knows.

        A container's `started` is its startup probe, which asks for readiness. So it tells a Pod
        that lost its readiness, and may have requests, from one that never had any.
        """
        for container in (self.pod.get("status") or {}).get("containerStatuses") or ():
            if container.get("name") == ENGINE_CONTAINER:
                return bool(container.get("started"))
        return None

    @property
    def deletion_rank(self) -> tuple[bool, bool, bool, int]:
        """Where the ReplicaSet controller has this Pod when it picks some to delete, lowest first:
        unassigned, pending, not ready, then the deletion cost (`ActivePodsWithRanks`)."""
        status = self.pod.get("status") or {}
        return (
            bool((self.pod.get("spec") or {}).get("nodeName")),
            status.get("phase") != "Pending",
            _condition(self.pod, "Ready").get("status") == "True",
            self.deletion_cost,
        )

    @property
    def deletion_cost(self) -> int:
        """The Pod's deletion cost; 0 where there is none or none that can be read."""
        text = (self.pod["metadata"].get("annotations") or {}).get(COST_ANNOTATION, "0")
        try:
            return int(text)
        except ValueError:
            return 0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The Deployment and its Pods; the Pods of former revisions included."""

    deployment: Object | None
    replica_count: int
    """`spec.replicas` of the Deployment; 0 while there is none."""
    replicas: tuple[Replica, ...]
    replica_sets: tuple[Object, ...] = ()

    @property
    def existing(self) -> int:
        """Pods that exist and are not on their way out."""
        return sum(1 for r in self.replicas if r.phase is not ReplicaPhase.TERMINATING)

    @property
    def ready(self) -> int:
        """Pods that serve: ready, and those that drain are not."""
        return sum(1 for r in self.replicas if r.phase is ReplicaPhase.READY)

    @property
    def rollout_in_progress(self) -> bool:
        """Whether the Deployment is replacing Pods by those of a newer template."""
        if self.deployment is None:
            return False
        status = self.deployment.get("status") or {}
        if int(status.get("observedGeneration") or 0) < int(
            self.deployment["metadata"].get("generation") or 0
        ):
            # A mere change of replicas is unobserved for a moment too; the revisions tell.
            return self._is_new_template or len({r.revision for r in self.replicas}) > 1
        total = int(status.get("replicas") or 0)
        return int(status.get("updatedReplicas") or 0) < total

    @property
    def _is_new_template(self) -> bool:
        """Whether no ReplicaSet exists yet for the Deployment's template as it is."""
        assert self.deployment is not None
        known = any(_same_template(self.deployment, each) for each in self.replica_sets)
        return bool(self.replica_sets) and not known

    def view(self, target_replicas: int, start_seconds: float) -> FleetView:
        """The fleet as the decision sees it."""
        replicas = tuple(ReplicaView(r.uid, r.name, r.phase, r.since) for r in self.replicas)
        return FleetView(target_replicas, replicas, self.rollout_in_progress, start_seconds)


def observe_fleet(caches: Caches, service_uid: str, replicas_of: Callable[[Object], int]) -> Fleet:
    """The Deployment and Pods that belong to the service with this UID."""
    deployments = [
        d for d in caches[DEPLOYMENTS].labelled(service_uid) if controller_uid(d) == service_uid
    ]
    if not deployments:
        return Fleet(None, 0, ())
    deployment = deployments[0]
    owner = uid_of(deployment)
    sets = {
        uid_of(s): s
        for s in caches[REPLICA_SETS].labelled(service_uid)
        if controller_uid(s) == owner
    }
    replicas = []
    for pod in caches[PODS].labelled(service_uid):
        revision = controller_uid(pod)
        if revision in sets and (pod.get("status") or {}).get("phase") not in {
            "Failed",
            "Succeeded",
        }:
            replicas.append(_replica(pod, revision))
    return Fleet(deployment, replicas_of(deployment), tuple(replicas), tuple(sets.values()))


def _same_template(deployment: Object, replica_set: Object) -> bool:
    """As the Deployment controller compares: equal but for the label that it adds itself."""
    wanted, template = (
        (o.get("spec") or {}).get("template") or {} for o in (deployment, replica_set)
    )
    metadata = dict(template.get("metadata") or {})
    metadata["labels"] = dict(metadata.get("labels") or {})
    metadata["labels"].pop(TEMPLATE_HASH_LABEL, None)
    return bool({**template, "metadata": metadata} == {"metadata": {"labels": {}}, **wanted})


def unix_seconds(timestamp: str | None) -> float:
    """Unix seconds of an API time; 0 for none."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0


def _replica(pod: Object, revision: str) -> Replica:
    created = unix_seconds(pod["metadata"].get("creationTimestamp"))
    if pod["metadata"].get("deletionTimestamp"):
        since = unix_seconds(pod["metadata"]["deletionTimestamp"])
        return Replica(pod, ReplicaPhase.TERMINATING, since, revision)
    ready = _condition(pod, "Ready")
    moved = unix_seconds(ready.get("lastTransitionTime")) or created
    if DRAIN_ANNOTATION in (pod["metadata"].get("annotations") or {}):
        return Replica(pod, ReplicaPhase.DRAINING, moved, revision)
    if ready.get("status") == "True":
        return Replica(pod, ReplicaPhase.READY, moved, revision)
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        since = unix_seconds(scheduled.get("lastTransitionTime")) or created
        complaint = str(scheduled.get("message") or "no node takes it")
        return Replica(pod, ReplicaPhase.UNSCHEDULABLE, since, revision, complaint)
    complaint = _failing(pod)
    phase = ReplicaPhase.CRASH_LOOPING if complaint else ReplicaPhase.WARMING
    return Replica(pod, phase, created, revision, complaint)


def _condition(pod: Object, kind: str) -> Object:
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == kind:
            return dict(condition)
    return {}


def _failing(pod: Object) -> str:
    status = pod.get("status") or {}
    statuses = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    for container in statuses:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in FAILING_REASONS:
            last = (container.get("lastState") or {}).get("terminated") or {}
            words = str(last.get("message") or waiting.get("message") or "").strip()
            return f"{container.get('name')}: {waiting['reason']}: {words[-400:]}"
    return ""
