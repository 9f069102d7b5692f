"""One operator acts at a time: a Lease around the whole process.

The elector that ships with the client keeps "leading" when the API server refuses connections or
hangs, counts by wall clock, and cannot create a Lease. This one has three rules. Time is the
event loop's monotonic clock, and another holder's Lease is judged by how long *we* saw it
unchanged. Every call has a deadline. Every exception means "not renewed". Who could not renew in
time stops at once, and the process ends.
"""

import asyncio
import contextlib
import datetime
import logging
import random
from collections.abc import Coroutine
from typing import Any

from kvscaler_operator.gateways.kube import ConflictError, KubeGateway, NotFoundError
from kvscaler_operator.resources import LEASES, Object

logger = logging.getLogger(__name__)

CONFLICT_TRIES = 2


class LeaseLostError(Exception):
    """The Lease could not be renewed in time: someone else may act now."""


class LeaseElector:
    """Holds `namespace/name` for `identity` while a piece of work runs."""

    def __init__(
        self,
        kube: KubeGateway,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration_seconds: float = 15.0,
        deadline_seconds: float = 10.0,
        retry_seconds: float = 2.0,
        randomness: random.Random | None = None,
    ) -> None:
        if not retry_seconds < deadline_seconds < duration_seconds:
            raise ValueError("a lease needs retry < renew deadline < duration")
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration = duration_seconds
        self._deadline = deadline_seconds
        self._retry = retry_seconds
        self._random = randomness or random.Random()
        self._seen: tuple[str, float] | None = None
        self._renewed_at: float | None = None

    @property
    def held(self) -> bool:
        """Whether the Lease is ours for certain: renewed less than the deadline ago."""
        return self._renewed_at is not None and _now() - self._renewed_at < self._deadline

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the Lease, run `work` under it, release it.

        Raises `LeaseLostError` when it could not be renewed; `work` is cancelled by then, and the
        caller should end the process. Exceptions of `work` pass through.
        """
        try:
            await self._acquire()
        except BaseException:
            work.close()
            raise
        task = asyncio.ensure_future(work)
        renewal = asyncio.ensure_future(self._renew_until_lost())
        try:
            await asyncio.wait({task, renewal}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                renewal.result()  # raises LeaseLostError, or what broke the renewal
            await task
        finally:
            for each in (task, renewal):
                each.cancel()
            await asyncio.gather(task, renewal, return_exceptions=True)
            await self._release()

    async def _acquire(self) -> None:
        while True:
            if await self._try_once():
                break
            await asyncio.sleep(self._jittered(self._retry))
        logger.info("Acquired lease %s/%s as %s", self._namespace, self._name, self._identity)

    async def _renew_until_lost(self) -> None:
        while True:
            await asyncio.sleep(self._jittered(self._retry))
            if await self._try_once():
                continue
            if not self.held:
                raise LeaseLostError(
                    f"lease {self._namespace}/{self._name} was not renewed within "
                    f"{self._deadline:g} s: another operator may act now, so this one stops"
                )

    async def _try_once(self) -> bool:
        begun = _now()
        budget = self._retry
        if self._renewed_at is not None:
            budget = max(0.05, self._renewed_at + self._deadline - begun)
        try:
            # Not wait_for: that can swallow a cancellation, and renewing would never end.
            async with asyncio.timeout(budget):
                renewed = await self._acquire_or_renew()
        except Exception as error:
            # Whatever happened, the Lease is not renewed; only the words differ.
            logger.warning("Lease not renewed: %s", str(error) or type(error).__name__)
            return False
        if renewed:
            self._renewed_at = begun
        return renewed

    async def _acquire_or_renew(self) -> bool:
        """One try; a write that conflicts is looked at anew at once, as a whole try later might be
        too late and meet the next conflict."""
        for _ in range(CONFLICT_TRIES):
            with contextlib.suppress(ConflictError):
                return await self._write_if_free()
        return False

    async def _write_if_free(self) -> bool:
        try:
            lease = await self._kube.get(LEASES, self._namespace, self._name)
        except NotFoundError:
            await self._kube.create(LEASES, self._document(None), limited=False)
            return True
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") not in (None, "", self._identity) and not self._expired(
            lease
        ):
            return False
        await self._kube.replace(LEASES, self._document(lease), limited=False)
        return True

    def _expired(self, lease: Object) -> bool:
        version = str(lease["metadata"]["resourceVersion"])
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, _now())
        duration = float(lease["spec"].get("leaseDurationSeconds") or self._duration)
        return _now() - self._seen[1] >= duration

    async def _release(self) -> None:
        if not self.held:
            return
        self._renewed_at = None
        with contextlib.suppress(Exception):
            # Best effort: if it fails, the next operator waits for the duration.
            async with asyncio.timeout(self._retry):
                await self._hand_back()

    async def _hand_back(self) -> None:
        lease = await self._kube.get(LEASES, self._namespace, self._name)
        if lease["spec"].get("holderIdentity") == self._identity:
            lease["spec"].update(holderIdentity="", leaseDurationSeconds=1)
            await self._kube.replace(LEASES, lease, limited=False)
            logger.info("Released lease %s/%s", self._namespace, self._name)

    def _document(self, lease: Object | None) -> Object:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = (lease or {}).get("spec") or {}
        same = old.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._duration)),
            "acquireTime": old.get("acquireTime") if same else now,
            "renewTime": now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (0 if same else 1),
        }
        metadata = {"namespace": self._namespace, "name": self._name}
        if lease is not None:
            metadata = dict(lease["metadata"])
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": metadata,
            "spec": spec,
        }

    def _jittered(self, seconds: float) -> float:
        return seconds * (0.9 + 0.2 * self._random.random())


def _now() -> float:
    return asyncio.get_running_loop().time()
