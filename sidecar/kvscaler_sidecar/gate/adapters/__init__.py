"""One adapter per engine type: where its pages are and what they mean."""

from kvscaler_sidecar.gate.adapters.own import OwnEngine
from kvscaler_sidecar.gate.adapters.seam import EngineAdapter
from kvscaler_sidecar.start import StartRefused

ADAPTERS: tuple[type[EngineAdapter], ...] = (OwnEngine,)


def adapter_for(engine_type: str) -> EngineAdapter:
    """The adapter of an engine type; raises `StartRefused` for one that is not built."""
    for adapter in ADAPTERS:
        if adapter.engine_type == engine_type:
            return adapter()
    built = ", ".join(adapter.engine_type for adapter in ADAPTERS)
    raise StartRefused(
        f"engine type {engine_type!r} can't be gated yet; built: {built} (KVSCALER_ENGINE_TYPE)"
    )
