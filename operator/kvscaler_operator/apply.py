"""Bringing children to what they should be, with no write when they are.

Three rules. A child is created by an apply that does not force: if someone else's object is under
its name, the API server refuses, and it is never adopted. Later applies force, since the fields in
our documents are ours, and carry the UID, so that they can't create anything. And what a
comparison can't settle (a server that rewrites a value) is applied once and then remembered.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvscaler_api.reasons import EventReason, Reason

from kvscaler_operator.cache import ObjectCache
from kvscaler_operator.children.compare import (
    HASH_ANNOTATION,
    content_hash,
    difference,
)
from kvscaler_operator.errors import Blocked
from kvscaler_operator.events import EventRecorder
from kvscaler_operator.gateways.kube import (
    FIELD_MANAGER,
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeGateway,
)
from kvscaler_operator.resources import (
    CHILDREN,
    DEPLOYMENTS,
    Object,
    Resource,
    controller_uid,
    name_of,
    namespace_of,
    uid_of,
)
from kvscaler_operator.scale import ScaleWriter

RESTORE_PAUSE_SECONDS = 1.0
RESTORE_PAUSE_CAP_SECONDS = 60.0

_BY_KIND = {resource.kind: resource for resource in CHILDREN}


@dataclass(slots=True)
class _Memory:
    """What was last applied to a child, and how often it had to be restored in a row."""

    document_hash: str = ""
    accepted: str = ""
    """Hash of the live content that our document led to, for values that the server rewrites."""
    restored: int = 0
    restored_at: float = field(default=float("-inf"))
    agreed: tuple[Object, Object] | None = None
    """A document and a live object, themselves and not their content, that were compared and said
    the same: nothing has to be compared as long as both are still the same ones."""


class ChildWriter:
    """Applies children. Keeps a little memory per child that a restart may lose."""

    def __init__(
        self,
        kube: KubeGateway,
        caches: Mapping[Resource, ObjectCache],
        events: EventRecorder,
        scales: ScaleWriter,
    ) -> None:
        self._kube = kube
        self._scales = scales
        self._caches = caches
        self._events = events
        self._memory: dict[str, _Memory] = {}

    def keep(self, uids: set[str]) -> None:
        """Forget children that are gone."""
        self._memory = {uid: m for uid, m in self._memory.items() if uid in uids}

    async def find(self, owner: Object, document: Object) -> Object | None:
        """The live child for `document`; raises `Blocked` when its name is someone else's.

        The cache holds only what carries our label, so an absence is checked with the server.
        """
        resource = _BY_KIND[document["kind"]]
        live = self._caches[resource].get(namespace_of(document), name_of(document))
        if live is None:
            live = await self._kube.find(resource, namespace_of(document), name_of(document))
        if live is None:
            return None
        if controller_uid(live) != uid_of(owner):
            raise _taken(document, live)
        if live["metadata"].get("deletionTimestamp"):
            words = f"{_words(document)} is being deleted; it is made again when it is gone"
            raise Blocked(Reason.PROGRESSING, words, retry_seconds=2.0)
        return live

    async def ensure(
        self,
        owner: Object,
        document: Object,
        live: Object | None,
        create_replicas: int | None = None,
    ) -> tuple[Object, float | None]:
        """Make the live child say what `document` says, which carries its hash.

        `create_replicas` goes into a Deployment at its creation. Returns the live object, and the
        seconds after which to look again when a restore was put off.
        """
        wanted = document
        if live is None:
            return await self._create(owner, wanted, create_replicas), None
        memory = self._memory.setdefault(uid_of(live), _Memory())
        if memory.agreed is not None and memory.agreed[0] is wanted and memory.agreed[1] is live:
            return live, None
        document_hash = wanted["metadata"]["annotations"][HASH_ANNOTATION]
        changed = (live["metadata"].get("annotations") or {}).get(HASH_ANNOTATION) != document_hash
        where = difference(wanted, live)
        if not changed and where is None:
            if asyncio.get_running_loop().time() - memory.restored_at > RESTORE_PAUSE_CAP_SECONDS:
                memory.restored = 0
                memory.agreed = (wanted, live)
            return live, None
        fingerprint = _fingerprint(live)
        if memory.document_hash == document_hash and memory.accepted == fingerprint:
            return live, None
        restoring = memory.document_hash == document_hash or not changed
        if restoring:
            pause = self._pause(memory)
            if pause > 0:
                return live, pause
        live = await self._apply(wanted, live)
        memory.document_hash = document_hash
        memory.accepted = _fingerprint(live)
        if restoring and _fingerprint(live) != fingerprint:
            note = f"Restored {_words(document)}: {where} was changed by someone else"
            self._events.record(owner, EventReason.CHILD_RESTORED, note, warning=True)
        return live, None

    def _pause(self, memory: _Memory) -> float:
        """Whoever fights us over a field is answered ever more slowly, up to once a minute."""
        now = asyncio.get_running_loop().time()
        wait = min(RESTORE_PAUSE_CAP_SECONDS, RESTORE_PAUSE_SECONDS * 2.0**memory.restored)
        if memory.restored and now - memory.restored_at < wait:
            return wait - (now - memory.restored_at)
        memory.restored = min(memory.restored + 1, 16)
        memory.restored_at = now
        return 0.0

    async def _create(self, owner: Object, wanted: Object, replicas: int | None) -> Object:
        resource = _BY_KIND[wanted["kind"]]
        document = wanted
        if replicas is not None:
            document = {**wanted, "spec": {**wanted["spec"], "replicas": replicas}}
        try:
            live = await self._kube.apply(resource, document, force=False)
        except ConflictError as error:
            live_now = await self._kube.find(resource, namespace_of(wanted), name_of(wanted))
            if live_now is not None and controller_uid(live_now) != uid_of(owner):
                raise _taken(wanted, live_now) from error
            raise
        except (InvalidError, ForbiddenError) as error:
            raise _refused(wanted, error) from error
        self._caches[resource].observe(live)
        memory = self._memory.setdefault(uid_of(live), _Memory())
        memory.document_hash = wanted["metadata"]["annotations"][HASH_ANNOTATION]
        memory.accepted = _fingerprint(live)
        self._events.record(owner, EventReason.CHILD_CREATED, f"Created {_words(wanted)}")
        if replicas is not None:
            await self._hand_over_replicas(live)
        return live

    async def _apply(self, wanted: Object, live: Object) -> Object:
        resource = _BY_KIND[wanted["kind"]]
        if resource is DEPLOYMENTS and owns_replicas_by_apply(live):
            await self._hand_over_replicas(live)
        document = {**wanted, "metadata": {**wanted["metadata"], "uid": uid_of(live)}}
        try:
            live = await self._kube.apply(resource, document)
        except (InvalidError, ForbiddenError) as error:
            raise _refused(wanted, error) from error
        self._caches[resource].observe(live)
        return live

    async def _hand_over_replicas(self, deployment: Object) -> None:
        """Own `spec.replicas` through the scale subresource before an apply leaves it out.

        A field that only an apply owned, and that the next apply does not have, is reset by the
        API server; for replicas that means 1, at once.
        """
        replicas = int(deployment["spec"].get("replicas", 1))
        await self._scales.write_deployment(deployment, replicas)


def owns_replicas_by_apply(deployment: Object) -> bool:
    """Whether our main document still owns `spec.replicas`, as it does right after creation."""
    for entry in deployment["metadata"].get("managedFields") or ():
        if (
            entry.get("manager") == FIELD_MANAGER
            and entry.get("operation") == "Apply"
            and not entry.get("subresource")
        ):
            return "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {})
    return False


def _fingerprint(live: Object) -> str:
    spec = dict(live.get("spec") or {})
    spec.pop("replicas", None)
    metadata = live["metadata"]
    return content_hash(
        {
            "spec": spec,
            "data": live.get("data"),
            "labels": metadata.get("labels"),
            "owners": metadata.get("ownerReferences"),
            "hash": (metadata.get("annotations") or {}).get(HASH_ANNOTATION),
        }
    )


def _words(document: Object) -> str:
    return f"{document['kind']} {name_of(document)}"


def _taken(document: Object, live: Object) -> Blocked:
    owner = controller_uid(live)
    whose = f"an object controlled by {owner}" if owner else "an object that is not ours"
    return Blocked(
        Reason.NAME_TAKEN,
        f"{_words(document)} exists already and is {whose}; it is never adopted. Delete or rename "
        "it, or give this service another name",
    )


def _refused(document: Object, error: InvalidError | ForbiddenError) -> Blocked:
    cause = error.message or error.reason
    if document["kind"] == DEPLOYMENTS.kind and isinstance(error, InvalidError):
        words = f"the API server refuses the Pod template: {cause}"
        return Blocked(Reason.TEMPLATE_INVALID, words)
    return Blocked(Reason.CHILD_REFUSED, f"the API server refuses {_words(document)}: {cause}")
