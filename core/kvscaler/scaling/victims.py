"""Which replicas go first: those that serve nobody, then those that have the least to finish."""

from collections.abc import Mapping

from kvscaler.protocol.state import OccupancyReport
from kvscaler.scaling.fleet import FleetView, ReplicaPhase, ReplicaView
from kvscaler.traffic.signal import Absent, Signal

_ORDER = {
    ReplicaPhase.UNSCHEDULABLE: 0,
    ReplicaPhase.CRASH_LOOPING: 1,
    ReplicaPhase.WARMING: 2,
    ReplicaPhase.READY: 3,
}
"""Draining and terminating replicas are not listed: they are going already."""


def victims(
    desired: int, fleet: FleetView, occupancy: Mapping[str, Signal[OccupancyReport]]
) -> tuple[str, ...]:
    """Pod UIDs to drain so that `desired` remain, in this order.

    None during a rollout, whose surplus Pods are not surplus. A replica whose load is unknown goes
    after all whose load is known.
    """
    staying = [r for r in fleet.replicas if r.phase in _ORDER]
    surplus = len(staying) - desired
    if surplus <= 0 or fleet.rollout_in_progress:
        return ()

    def rank(replica: ReplicaView) -> tuple[int, float, float, str]:
        load = float("inf")
        signal = occupancy.get(replica.pod_uid)
        if signal is not None and not isinstance(signal, Absent):
            load = max(signal.value.reserved_blocks, signal.value.referenced_blocks)
            load += signal.value.waiting_blocks
        if replica.phase is not ReplicaPhase.READY:
            load = 0.0
        return _ORDER[replica.phase], load, -replica.since, replica.pod_uid

    return tuple(r.pod_uid for r in sorted(staying, key=rank)[:surplus])
