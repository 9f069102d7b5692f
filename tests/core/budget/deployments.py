"""Deployments that tests ask questions of."""

from kvscaler import hardware
from kvscaler.budget import Deployment, EngineSettings, profile_for
from kvscaler.models import catalogue


def deployment(
    name="llama-3.1-8b", card="h100", engine="vllm@0.20.0", memory_bytes=None, **settings
):
    """A model of the catalogue on a known card, which may have another memory."""
    accelerator = hardware.find(card)
    if memory_bytes is not None:
        accelerator = accelerator.with_memory(memory_bytes)
    return Deployment(
        catalogue.find(name).architecture,
        accelerator,
        profile_for(engine, accelerator),
        EngineSettings(**settings),
    )
