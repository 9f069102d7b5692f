"""Our own engine behind a gate: its `/state` has everything in the protocol's words."""

from typing import ClassVar

from kvscaler.engine.gated import EngineCapacity
from kvscaler.protocol.state import ReplicaState
from pydantic import ValidationError

from kvscaler_sidecar.gate.adapters.seam import EngineReport, PageNotUnderstood

COMPLETIONS_PATH = "/v1/completions"
COMPLETIONS_DEFAULT_TOKENS = 16
ENGINE_COUNTERS = (
    "preemptions",
    "prefix_queried_tokens",
    "prefix_hit_tokens",
    "steps",
    "step_seconds",
    "prefill_tokens",
    "decode_tokens",
)


class OwnEngine:
    """`engine.type: Kvscaler`."""

    engine_type: ClassVar[str] = "Kvscaler"
    report_path: ClassVar[str] = "/state"

    def read(self, page: bytes) -> EngineReport:
        """From a `ReplicaState`."""
        try:
            state = ReplicaState.model_validate_json(page)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise PageNotUnderstood(
                f"{self.report_path}: {where or 'page'}: {first['msg']}"
            ) from None
        capacity = None
        if state.capacity is not None and state.limits is not None and state.capacity.kv_blocks:
            capacity = EngineCapacity(
                kv_blocks=state.capacity.kv_blocks,
                block_tokens=state.capacity.block_tokens,
                max_sequences=state.capacity.max_sequences,
                step_tokens=state.limits.applied.step_tokens,
                max_context_tokens=state.capacity.max_context_tokens,
            )
        return EngineReport(
            ready=state.ready,
            capacity=capacity,
            started_at=state.started_at,
            occupancy=state.occupancy,
            allocated=state.capacity,
            executor=state.executor,
            model=state.model,
            budget=state.budget,
            step_costs=state.step_costs,
            counters={name: getattr(state.traffic, name) for name in ENGINE_COUNTERS},
        )

    def default_output_tokens(self, path: str) -> int | None:
        """OpenAI's 16 for completions; a chat may fill its context."""
        return COMPLETIONS_DEFAULT_TOKENS if path == COMPLETIONS_PATH else None
