"""One module per engine. `profile_for` picks by the API's engine type, its version and the device."""

from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.profiles.own import OwnCpuProfile, OwnCudaProfile
from kvscaler.budget.profiles.vllm import VllmProfile
from kvscaler.budget.profiles.vllm_defaults import NEWEST
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator


class UnknownEngine(LookupError):
    """No profile describes how this engine spends memory."""


def profile_for(engine_type: str, accelerator: Accelerator) -> EngineProfile:
    """The profile of `engine_type` on a device; case does not matter.

    A version may follow: `vllm@0.20.0`. Raises `UnknownEngine` with the types that have one.
    """
    name, _, version = engine_type.partition("@")
    match name.strip().casefold():
        case "kvscaler":
            return OwnCpuProfile() if accelerator.device == "cpu" else OwnCudaProfile()
        case "vllm" if accelerator.device != "cpu":
            return VllmProfile(_version(version, NEWEST))
        case "vllm":
            raise UnknownEngine("vLLM's use of memory is described on accelerators only so far")
    raise UnknownEngine(f"no memory profile for engine {engine_type[:40]!r}; known: Kvscaler, VLLM")


def _version(text: str, newest: Version) -> Version:
    if not text:
        return newest
    found = Version.parse(text)
    if found is None:
        raise UnknownEngine(f"engine version {text[:40]!r} holds no number like 0.20.0")
    return found


__all__ = ["OwnCpuProfile", "OwnCudaProfile", "UnknownEngine", "VllmProfile", "profile_for"]
