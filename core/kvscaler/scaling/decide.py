"""The one function that sets replicas and limits, the same in operator and simulator."""

from collections.abc import Mapping

from kvscaler.protocol.state import OccupancyReport
from kvscaler.scaling.capacity import ReplicaCapacity
from kvscaler.scaling.decision import Decision
from kvscaler.scaling.fleet import FleetView
from kvscaler.scaling.history import History
from kvscaler.scaling.spec import ScalingSpec
from kvscaler.traffic.signal import Signal
from kvscaler.traffic.window import TrafficWindow


def decide(  # noqa: PLR0917 - the design names these seven, in this order
    spec: ScalingSpec,
    capacity: Signal[ReplicaCapacity],
    traffic: Signal[TrafficWindow],
    occupancy: Mapping[str, Signal[OccupancyReport]],
    fleet: FleetView,
    history: History,
    now: float,
) -> Decision:
    """Desired replicas and limits. Level-based: the same arguments give the same decision.

    `occupancy` is keyed by Pod UID; a ready replica that is not in it counts as missing.
    """
    raise NotImplementedError
