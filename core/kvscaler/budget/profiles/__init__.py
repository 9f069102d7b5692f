"""One module per engine. `profile_for` picks by the API's engine type and the device."""

from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.profiles.own import OwnCpuProfile, OwnCudaProfile
from kvscaler.budget.profiles.vllm import VllmV1Profile
from kvscaler.hardware import Accelerator


class UnknownEngine(LookupError):
    """No profile describes how this engine spends memory."""


def profile_for(engine_type: str, accelerator: Accelerator) -> EngineProfile:
    """The profile of `engine_type` (`Kvscaler` or `VLLM`, case does not matter) on a device.

    Raises `UnknownEngine` with the types that have one.
    """
    match engine_type.casefold():
        case "kvscaler":
            return OwnCpuProfile() if accelerator.device == "cpu" else OwnCudaProfile()
        case "vllm" if accelerator.device == "cuda":
            return VllmV1Profile()
        case "vllm":
            raise UnknownEngine("vLLM's use of memory is described on CUDA devices only so far")
    raise UnknownEngine(f"no memory profile for engine {engine_type!r}; known: Kvscaler, VLLM")


__all__ = ["OwnCpuProfile", "OwnCudaProfile", "UnknownEngine", "VllmV1Profile", "profile_for"]
