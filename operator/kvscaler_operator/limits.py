"""Giving replicas their admission limits: a PUT only where the hash differs.

The hash that counts is the one that a replica says it was last asked for (it may have clamped the
rest to what it physically has), or, before anybody asked, the one that it computed itself by the
same function. So a fleet whose replicas agree with the operator is never written to.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvscaler.protocol.limits import AdmissionLimits, LimitsPut, LimitsReport
from kvscaler.protocol.state import ReplicaState
from kvscaler.protocol.tokens import CLOCK_SKEW_SECONDS
from kvscaler.traffic import Present, Signal

from kvscaler_operator.gateways.sidecar import Endpoint, Fault, SidecarError, SidecarGateway
from kvscaler_operator.observe import Replica

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
RETRY_CAP_SECONDS = 60.0
SETTLE_SECONDS = 10.0
"""After a PUT that was accepted, the replica's own report is awaited this long before another."""


@dataclass(frozen=True, slots=True)
class LimitsOutcome:
    """How the fleet stands to the wanted limits; names of Pods."""

    applied: tuple[str, ...] = ()
    clamped: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Pods that took new limits just now."""
    problem: str = ""


class LimitsWriter:
    """Writes limits to replicas."""

    def __init__(
        self, sidecars: SidecarGateway, endpoint: Callable[[str, Replica], Endpoint | None]
    ) -> None:
        self._sidecars = sidecars
        self._endpoint = endpoint
        self._accepted: dict[str, tuple[LimitsReport, float]] = {}
        self._refused: dict[str, tuple[int, float, str]] = {}

    async def step(
        self,
        service_uid: str,
        replicas: Sequence[Replica],
        states: Mapping[str, Signal[ReplicaState]],
        wanted: AdmissionLimits,
    ) -> LimitsOutcome:
        """Give `wanted` to each replica that says it has others. `replicas` are those ready."""
        known = [self._known(r, states.get(r.uid), wanted) for r in replicas]
        told = iter(
            await asyncio.gather(
                *(
                    self._tell(service_uid, r, report, wanted, states.get(r.uid))
                    for r, report in zip(replicas, known, strict=True)
                    if isinstance(report, LimitsReport)
                )
            )
            if any(isinstance(report, LimitsReport) for report in known)
            else ()
        )
        outcomes = [next(told) if isinstance(one, LimitsReport) else one for one in known]
        named = list(zip(replicas, outcomes, strict=True))
        return LimitsOutcome(
            applied=tuple(r.name for r, (kind, _) in named if kind in ("applied", "changed")),
            clamped=tuple(r.name for r, (kind, _) in named if kind == "clamped"),
            pending=tuple(r.name for r, (kind, _) in named if kind == "pending"),
            changed=tuple(r.name for r, (kind, _) in named if kind == "changed"),
            problem=next((words for _, (_, words) in named if words), ""),
        )

    def _known(
        self, replica: Replica, signal: Signal[ReplicaState] | None, wanted: AdmissionLimits
    ) -> tuple[str, str] | LimitsReport:
        """How a replica stands to the limits; its own report of others that it has yet."""
        if not isinstance(signal, Present) or signal.value.limits is None:
            return "pending", f"{replica.name} does not report its limits"
        report = self._newest(replica, signal.value.limits)
        if in_force(report, wanted):
            if report.clamped or report.requested_hash not in (None, report.hash):
                return "clamped", _clamped(replica, report)
            return "applied", ""
        return report

    async def _tell(
        self,
        service_uid: str,
        replica: Replica,
        report: LimitsReport,
        wanted: AdmissionLimits,
        signal: Signal[ReplicaState] | None,
    ) -> tuple[str, str]:
        endpoint = self._endpoint(service_uid, replica)
        if endpoint is None:
            return "pending", f"{replica.name} has no address"
        tries, due, words = self._refused.get(replica.uid, (0, float("-inf"), ""))
        now = asyncio.get_running_loop().time()
        if now < due:
            return "pending", words
        put = LimitsPut(if_hash=report.hash, limits=wanted)
        try:
            answer = await self._sidecars.put_limits(endpoint, put)
        except SidecarError as error:
            pause = min(RETRY_CAP_SECONDS, RETRY_SECONDS * 2.0**tries)
            words = f"{error}{_skew(signal) if isinstance(signal, Present) else ''}"
            self._refused[replica.uid] = (min(tries + 1, 16), now + pause, words)
            if tries == 0 and error.fault is not Fault.CONFLICT:
                logger.warning("Limits not accepted by %s: %s", replica.name, words)
            return "pending", words
        self._refused.pop(replica.uid, None)
        self._accepted[replica.uid] = (answer, asyncio.get_running_loop().time())
        if answer.clamped:
            return "clamped", _clamped(replica, answer)
        return "changed", ""

    def _newest(self, replica: Replica, reported: LimitsReport) -> LimitsReport:
        accepted = self._accepted.get(replica.uid)
        if accepted is None or asyncio.get_running_loop().time() - accepted[1] > SETTLE_SECONDS:
            return reported
        return accepted[0]

    def keep(self, pod_uids: set[str]) -> None:
        """Forget Pods that are gone."""
        self._accepted = {uid: a for uid, a in self._accepted.items() if uid in pod_uids}
        self._refused = {uid: r for uid, r in self._refused.items() if uid in pod_uids}


def in_force(report: LimitsReport, wanted: AdmissionLimits) -> bool:
    """Whether a replica enforces `wanted`, as far as it physically can."""
    if report.requested_hash is not None:
        return report.requested_hash == wanted.content_hash
    return report.hash == wanted.content_hash


def _clamped(replica: Replica, report: LimitsReport) -> str:
    # Which ones is not exported to Prometheus; that they are others than asked for is.
    lowered = ", ".join(report.clamped) or "some limits"
    return f"{replica.name} lowered {lowered} to what it physically has"


def _skew(signal: Present[ReplicaState]) -> str:
    """A replica takes a token that was signed by another clock for expired, or for forged."""
    seconds = signal.value.observed_at - signal.time
    if abs(seconds) <= CLOCK_SKEW_SECONDS:
        return ""
    side = "ahead of" if seconds > 0 else "behind"
    return f"; its clock is {abs(seconds):.0f} s {side} ours: set the clock of its node"
