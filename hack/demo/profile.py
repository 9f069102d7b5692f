"""What sets the demos apart: the service, its requests, how fast it is, and what must be seen.

Everything else (cluster, chart, traffic, view, verdict, picture) is the same code for all of them.
"""

from dataclasses import dataclass

from hack.demo.traffic import Shape


@dataclass(frozen=True, slots=True)
class Profile:
    """One demo. Rates are shares of the rate that fills one replica's KV blocks."""

    name: str
    """Of the make target, and of the folder under `build/`."""
    title: str
    example: str
    """File in `examples/` with the service."""
    shape: Shape
    calm_share: float
    spike_share: float
    calm_seconds: float
    spike_seconds: float
    return_deadline_seconds: float
    admitted_peak_share: float
    """Admitted blocks must peak at this many times one replica's."""
    request_timeout_seconds: float = 180.0
    sample_seconds: float = 0.5
    modelled: bool = False
    """Replicas run the executor `Modelled`: their speed is known, and not measured."""
    most_chunks_per_second: float | None = None
    """What all replicas together may emit, so that clients on a small machine keep up."""


DEMO = Profile(
    name="demo",
    title="kvscaler demo",
    example="smollm2.yaml",
    shape=Shape(),
    calm_share=0.25,
    spike_share=2.45,
    calm_seconds=40.0,
    spike_seconds=90.0,
    return_deadline_seconds=240.0,
    admitted_peak_share=1.8,
)
"""A real model on CPUs: the spike needs about 2.5 replicas."""

FLEET = Profile(
    name="demo-fleet",
    title="kvscaler fleet demo: modelled H100s with Llama-3.1-8B",
    example="modelled-h100.yaml",
    # 20,000 to 28,000 prompt tokens, four bytes each.
    shape=Shape(prompt_words=(10_600, 14_800), output_tokens=(400, 800)),
    calm_share=1.25,
    spike_share=12.5,
    calm_seconds=60.0,
    spike_seconds=150.0,
    return_deadline_seconds=300.0,
    admitted_peak_share=9.0,
    request_timeout_seconds=400.0,
    sample_seconds=1.0,
    modelled=True,
    most_chunks_per_second=5000.0,
)
"""A tenfold spike on long documents, up to 20 Pods: what a fleet of H100s would do, at half its
speed, on two cores. `docs/modelled.md` says why these lengths and this time scale."""

PROFILES = {profile.name: profile for profile in (DEMO, FLEET)}
