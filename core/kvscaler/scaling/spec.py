"""What a service asks of its scaling, in plain numbers: the API's types stay outside the brain."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """Bounds, behaviour and objectives of one service.

    `time_per_output_token_seconds` and `time_to_first_token_seconds` are `None` when the service
    has no such objective.
    """

    min_replicas: int
    max_replicas: int
    stabilization_seconds: float = 300.0
    hold_seconds: float = 600.0
    time_per_output_token_seconds: float | None = None
    time_to_first_token_seconds: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"replicas must be 1 <= min <= max, not min {self.min_replicas}, max {self.max_replicas}"
            )
        if self.stabilization_seconds < 0 or self.hold_seconds < 0:
            raise ValueError("stabilization and hold windows can't be negative")
