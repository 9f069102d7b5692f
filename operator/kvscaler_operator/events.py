"""Events on objects, aggregated: the same words twice within two minutes are one Event.

A controller that posts every repetition can fill etcd. Here repetitions within the window are
dropped, later ones only raise the count of the Event that is there, and each object has a budget.
Posting happens beside the reconcile, from a bounded queue: an Event is never worth a delay.
"""

import asyncio
import contextlib
import datetime
import logging
import uuid
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvscaler_operator.gateways.kube import KubeError, KubeGateway, NotFoundError
from kvscaler_operator.gateways.limiter import TokenBucket
from kvscaler_operator.resources import EVENTS, Object, name_of, namespace_of, uid_of

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 120.0
SERIES_SECONDS = 3600.0
"""After this long without a repetition a new Event is made: the API server forgets old ones."""
PENDING_EVENTS = 256
NOTE_CHARACTERS = 1024
"""The API's own limit for a note."""
COMPONENT = "kvscaler-operator"


class EventType(StrEnum):
    """The two types that Kubernetes knows."""

    NORMAL = "Normal"
    WARNING = "Warning"


class _Key(NamedTuple):
    uid: str
    reason: str
    note: str


@dataclass(slots=True)
class _Series:
    name: str
    namespace: str
    posted_at: float
    count: int = 1


class EventRecorder:
    """Records events; `run` posts them."""

    def __init__(self, kube: KubeGateway, instance: str) -> None:
        self._kube = kube
        self._instance = instance
        self._series: dict[_Key, _Series] = {}
        self._budgets: dict[str, TokenBucket] = {}
        self._pending: asyncio.Queue[tuple[_Key, Object | None]] = asyncio.Queue(PENDING_EVENTS)
        self.dropped = 0
        """Events that a budget or the full queue kept back."""

    def record(
        self,
        obj: Object,
        reason: str,
        note: str,
        *,
        warning: bool = False,
        action: str = "Reconcile",
    ) -> None:
        """Say something about an object (`reason` in CamelCase and stable; `note` for people)."""
        now = _now()
        note = note[:NOTE_CHARACTERS]
        key = _Key(uid_of(obj), reason, note)
        series = self._series.get(key)
        if series is not None and now - series.posted_at < WINDOW_SECONDS:
            series.count += 1
            return
        budget = self._budgets.setdefault(key.uid, TokenBucket(1 / 20.0, 20))
        if not budget.try_take():
            self.dropped += 1
            return
        document = None
        if series is None or now - series.posted_at > SERIES_SECONDS:
            document = self._document(obj, key, warning, action)
            series = _Series(name_of(document), namespace_of(document), now)
            self._series[key] = series
        else:
            series.count += 1
            series.posted_at = now
        self._prune(now)
        try:
            self._pending.put_nowait((key, document))
        except asyncio.QueueFull:
            self.dropped += 1

    def forget(self, uid: str) -> None:
        """Forget an object that is gone."""
        self._budgets.pop(uid, None)
        self._series = {k: s for k, s in self._series.items() if k.uid != uid}

    async def run(self) -> None:
        """Post what was recorded, until cancelled."""
        while True:
            key, document = await self._pending.get()
            try:
                await self._post(key, document)
            except NotFoundError:
                pass  # its namespace is going, and takes the object of the event along
            except KubeError as error:
                logger.warning("An event was not posted: %s", error)
            finally:
                self._pending.task_done()

    async def flush(self, timeout_seconds: float) -> None:
        """Wait until all that was recorded so far is posted, at most `timeout_seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._pending.join()

    async def _post(self, key: _Key, document: Object | None) -> None:
        if document is not None:
            await self._kube.create(EVENTS, document)
            return
        series = self._series.get(key)
        if series is None:
            return
        patch = {"series": {"count": series.count, "lastObservedTime": _timestamp()}}
        try:
            await self._kube.merge(EVENTS, series.namespace, series.name, patch)
        except NotFoundError:
            self._series.pop(key, None)  # expired: the next repetition makes a new one

    def _document(self, obj: Object, key: _Key, warning: bool, action: str) -> Object:
        namespace = namespace_of(obj) or "default"
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {
                "namespace": namespace,
                "name": f"{name_of(obj)}.{uuid.uuid4().hex[:16]}",
            },
            "eventTime": _timestamp(),
            "reportingController": COMPONENT,
            "reportingInstance": self._instance,
            "action": action,
            "reason": key.reason,
            "note": key.note,
            "type": EventType.WARNING if warning else EventType.NORMAL,
            "regarding": {
                "apiVersion": obj["apiVersion"],
                "kind": obj["kind"],
                "namespace": namespace_of(obj),
                "name": name_of(obj),
                "uid": key.uid,
                "resourceVersion": obj["metadata"].get("resourceVersion", ""),
            },
        }

    def _prune(self, now: float) -> None:
        if len(self._series) > 10_000:
            self._series = {
                k: s for k, s in self._series.items() if now - s.posted_at < WINDOW_SECONDS
            }


def _timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _now() -> float:
    return asyncio.get_running_loop().time()
