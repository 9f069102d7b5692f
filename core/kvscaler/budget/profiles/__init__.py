"""One module per engine. `profile_for` picks by the API's engine type, its version and the device."""

from kvscaler.budget.profile import EngineProfile
from kvscaler.budget.profiles.free_share import FreeShareProfile, lmdeploy, tensorrt_llm, tgi
from kvscaler.budget.profiles.llama_cpp import LlamaCppProfile
from kvscaler.budget.profiles.own import OwnCpuProfile, OwnCudaProfile
from kvscaler.budget.profiles.sglang import NEWEST as NEWEST_SGLANG
from kvscaler.budget.profiles.sglang import SglangProfile
from kvscaler.budget.profiles.vllm import VllmProfile
from kvscaler.budget.profiles.vllm_defaults import NEWEST
from kvscaler.budget.version import Version
from kvscaler.hardware import Accelerator

ENGINES = ("Kvscaler", "VLLM", "SGLang", "TensorRTLLM", "LMDeploy", "TGI", "LlamaCpp")
"""Engine types of the API, all of which have a profile."""


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
        case "sglang":
            return SglangProfile(accelerator.device, _version(version, NEWEST_SGLANG))
        case "tensorrtllm" | "tensorrt-llm" | "trtllm":
            return tensorrt_llm(_optional(version))
        case "lmdeploy":
            return lmdeploy(_optional(version))
        case "tgi":
            return tgi(_optional(version))
        case "llamacpp" | "llama.cpp":
            return LlamaCppProfile()
    raise UnknownEngine(
        f"no memory profile for engine {engine_type[:40]!r}; known: {', '.join(ENGINES)}"
    )


def _optional(text: str) -> Version | None:
    return _version(text, Version(0)) if text else None


def _version(text: str, newest: Version) -> Version:
    if not text:
        return newest
    found = Version.parse(text)
    if found is None:
        raise UnknownEngine(f"engine version {text[:40]!r} holds no number like 0.20.0")
    return found


__all__ = [
    "ENGINES",
    "FreeShareProfile",
    "LlamaCppProfile",
    "OwnCpuProfile",
    "OwnCudaProfile",
    "SglangProfile",
    "UnknownEngine",
    "VllmProfile",
    "profile_for",
]
