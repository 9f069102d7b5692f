"""Everything that changes something outside the process, in one place to be handed around."""

from dataclasses import dataclass

from kvscaler_operator.apply import ChildWriter
from kvscaler_operator.drain import Drainer
from kvscaler_operator.events import EventRecorder
from kvscaler_operator.gateways.kube import KubeGateway
from kvscaler_operator.limits import LimitsWriter
from kvscaler_operator.scale import ScaleWriter


@dataclass(frozen=True, slots=True)
class Writers:
    """The writers, each with its own rules about when not to write."""

    kube: KubeGateway
    children: ChildWriter
    scales: ScaleWriter
    drainer: Drainer
    limits: LimitsWriter
    events: EventRecorder
