"""From flags to a question: the deployment that is meant, what is asked of it, what was overridden.

Every fault names the flag or the file that holds it, and what to write instead.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from kvscaler import hardware
from kvscaler.budget import (
    Demand,
    Deployment,
    EngineSettings,
    Observation,
    UnknownEngine,
    gib,
    profile_for,
    quantized,
)
from kvscaler.hardware import Accelerator
from kvscaler.models import (
    ModelArchitecture,
    ModelNotUnderstood,
    UnknownModel,
    canonical_dtype,
    catalogue,
    read_model,
)
from kvscaler.models.dtypes import DTYPE_BYTES
from kvscaler.models.kv_formats import kv_format

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Weights in one of these are what the engine computes in; all others are quantized."""
OWN_ENGINES = ("kvscaler-cpu", "kvscaler-cuda")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, in the brain's own terms."""

    model_name: str
    deployment: Deployment
    engine_words: str
    """The engine and its version, as the output calls it."""
    demand: Demand | None
    concurrency: int | None
    observation: Observation | None
    overrides: tuple[str, ...]
    """Facts that flags replaced, in words."""


@contextmanager
def blamed(flag: str) -> Iterator[None]:
    """Turn what the brain refuses into an error of the command line that names `flag`."""
    try:
        yield
    except (
        ModelNotUnderstood,
        UnknownEngine,
    ) as error:
        raise click.UsageError(f"{flag}: {error}") from error
    except UnknownModel as error:
        raise click.UsageError(f"{flag}: {error} (`kvscaler list models`)") from error
    except hardware.UnknownAccelerator as error:
        raise click.UsageError(f"{flag}: {error} (`kvscaler list accelerators`)") from error


def question_of(flags: Mapping[str, Any]) -> Question:
    """The question that `flags` (by their names with underscores) ask; raises `UsageError`."""
    name = _one_model(flags["model_argument"], flags["model"])
    overrides: list[str] = []
    model = _model(name, flags["override"], overrides)
    accelerator = _accelerator(flags, overrides)
    with blamed("--engine"):
        profile = profile_for(flags["engine"], accelerator)
    settings = _settings(flags, model)
    _refuse_what_own_engine_lacks(profile.name, settings)
    deployment = Deployment(model, accelerator, profile, settings)
    if weights := flags["weight_dtype"]:
        deployment = _with_weights(deployment, weights, overrides)
    demand = _demand(flags)
    if flags["kv_bytes"] is not None and flags["observed"] is not None:
        raise click.UsageError(
            "--kv-bytes sets the pool and --observed reports it: give one of them"
        )
    return Question(
        model_name=name,
        deployment=deployment,
        engine_words=_engine_words(profile, flags["engine"]),
        demand=demand,
        concurrency=flags["concurrency"],
        observation=flags["observed"],
        overrides=tuple(overrides),
    )


def _one_model(argument: str | None, option: str | None) -> str:
    if argument and option and argument != option:
        raise click.UsageError(
            f"two models are named, {argument!r} and --model {option!r}: name one"
        )
    name = argument or option
    if not name:
        raise click.UsageError(
            "no model is named: give a name of the catalogue, such as llama-3.1-8b, or the path of "
            "a config.json, of its folder or of a GGUF file"
        )
    return name


def _model(name: str, pairs: tuple[str, ...], overrides: list[str]) -> ModelArchitecture:
    """The model called or stored at `name`, with the facts in `pairs` (`field=value`) replaced."""
    stated = dict(_pair(text) for text in pairs)
    path = Path(name)
    with blamed("--model"):
        if path.exists():
            model = read_model(path)
            changed = read_model(path, stated) if stated else model
        elif path.suffix in (".json", ".gguf") or name.startswith((".", "/", "~")):
            raise click.UsageError(f"--model: there is no file {name}")
        else:
            model = catalogue.find(name).architecture
            changed = ModelArchitecture.from_config(model.facts, stated) if stated else model
    for field, value in stated.items():
        before = model.facts.get(field)
        told = "says nothing of it" if before is None else f"says {before}"
        overrides.append(f"{field} = {value} (the model {told})")
    return changed


def _pair(text: str) -> tuple[str, Any]:
    field, separator, value = text.partition("=")
    if not separator or not field:
        raise click.UsageError(
            f"--override {text[:60]!r} is no FIELD=VALUE; write num_key_value_heads=8"
        )
    try:
        return field.strip(), json.loads(value)
    except ValueError:
        return field.strip(), value


def _accelerator(flags: Mapping[str, Any], overrides: list[str]) -> Accelerator:
    name, memory, bandwidth = flags["accelerator"], flags["memory"], flags["bandwidth"]
    if name is None:
        if memory is None:
            raise click.UsageError(
                "no device is named: give --accelerator (h100, l40s, rtx-4090, cpu …) or its "
                "--memory as the driver reports it, such as 79.2GiB"
            )
        return hardware.custom(memory, bandwidth)
    with blamed("--accelerator"):
        device = hardware.find(name)
    if memory is not None:
        if device.memory_bytes is not None:
            overrides.append(
                f"memory = {gib(memory)} ({device.name} reports {gib(device.memory_bytes)})"
            )
        device = device.with_memory(memory)
    if device.memory_bytes is None:
        raise click.UsageError(
            f"--accelerator {device.name} has no memory of its own: give the limit of the container "
            "with --memory, such as 8Gi"
        )
    if bandwidth is not None:
        overrides.append(f"bandwidth = {bandwidth / 1e9:,.0f} GB/s")
        device = replace(device, bandwidth_bytes_per_second=bandwidth)
    return device


def _settings(flags: Mapping[str, Any], model: ModelArchitecture) -> EngineSettings:
    with blamed("--kv-dtype"):
        kv_dtype = kv_format(flags["kv_dtype"]).name if _chosen(flags["kv_dtype"]) else "Auto"
    speculative = flags["speculative_tokens"]
    tensor, context = flags["tensor_parallel"], flags["context_parallel"]
    if tensor % context:
        raise click.UsageError(
            f"--context-parallel {context} does not divide --tensor-parallel {tensor}, whose ranks "
            "it uses"
        )
    if bool(flags["max_loras"]) != bool(flags["max_lora_rank"]):
        raise click.UsageError("--max-loras and --max-lora-rank go together: give both")
    return EngineSettings(
        memory_utilization_percent=flags["memory_utilization"],
        max_context_tokens=flags["max_model_len"],
        max_sequences=flags["max_num_seqs"],
        step_tokens=flags["max_num_batched_tokens"],
        block_tokens=flags["block_size"],
        kv_dtype=kv_dtype,
        tensor_parallel=flags["tensor_parallel"],
        pipeline_parallel=flags["pipeline_parallel"],
        data_parallel=flags["data_parallel"],
        context_parallel=flags["context_parallel"],
        speculative_tokens=speculative,
        draft_layers=model.prediction_layers if speculative else 0,
        cuda_graphs=False if flags["enforce_eager"] else None,
        kv_cache_bytes=flags["kv_bytes"],
        adapters=flags["max_loras"] or 0,
        adapter_rank=flags["max_lora_rank"] or 0,
    )


def _chosen(dtype: str | None) -> bool:
    return dtype is not None and dtype.casefold() != "auto"


def _with_weights(deployment: Deployment, dtype: str, overrides: list[str]) -> Deployment:
    """Weights in `dtype`: a float type, which is also what is computed in, or a scheme."""
    if not _chosen(dtype):
        return deployment
    model = deployment.model
    before = model.quantization.name if model.quantization else model.native_dtype
    with blamed("--weight-dtype"):
        try:
            short = canonical_dtype(dtype)
        except ModelNotUnderstood:
            short = ""
        if short in FLOAT_DTYPES:
            plain = replace(model, quantization=None)
            if model.quantization is not None:
                plain = replace(plain, stored_bytes=None)
            changed = replace(deployment, model=plain).changed(compute_dtype=short)
            after = short
        else:
            changed = quantized(deployment, dtype)
            after = changed.model.quantization.name if changed.model.quantization else dtype
    if after != before:
        overrides.append(f"weights = {after} (the model has {before})")
    return changed


def _refuse_what_own_engine_lacks(profile: str, settings: EngineSettings) -> None:
    if profile not in OWN_ENGINES:
        return
    for flag, value in (
        ("--tensor-parallel", settings.tensor_parallel),
        ("--pipeline-parallel", settings.pipeline_parallel),
    ):
        if value > 1:
            raise click.UsageError(
                f"{flag} {value}: the kvscaler engine runs on one device; ask for another with "
                "--engine vllm, or for more replicas with --data-parallel"
            )
    if settings.kv_dtype != "Auto" and settings.kv_dtype not in DTYPE_BYTES:
        raise click.UsageError(
            f"--kv-dtype {settings.kv_dtype}: the kvscaler engine does not have it; leave the flag "
            "out to keep keys and values as they are computed, or ask for another --engine"
        )


def _demand(flags: Mapping[str, Any]) -> Demand | None:
    prompt, output = flags["prompt_tokens"], flags["output_tokens"]
    if prompt is None:
        if output is not None:
            raise click.UsageError("--output-tokens needs --prompt-tokens beside it")
        if flags["concurrency"] is None or flags["max_model_len"] is None:
            return None
        prompt = flags["max_model_len"]
    return Demand(prompt, output or 0, flags["concurrency"] or 1)


def _engine_words(profile: Any, asked: str) -> str:
    stated = asked.partition("@")[2]
    version = getattr(profile, "version", None)
    if version is None:
        return f"{profile.name} {stated}".rstrip()
    name = str(profile.name).split("-", 1)[0]
    return f"{name} {version}" + ("" if stated else " (assumed)")
