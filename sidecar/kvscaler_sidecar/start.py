"""What must hold before weights are loaded: a model that is understood, and memory that it fits.

A replica that can't work says so in its first second, in words, by exit code 78 and in the
termination message that `kubectl describe pod` shows; it never finds out by running out of memory.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvscaler import hardware
from kvscaler.budget import (
    AUTO,
    AdmissionPolicy,
    BudgetUnknown,
    EngineSettings,
    KVBudget,
    UnknownEngine,
    admission_limits,
    compute_budget,
    gib,
    profile_for,
)
from kvscaler.models import ModelArchitecture, UnknownModel, catalogue
from kvscaler.protocol.limits import AdmissionLimits, AdmissionMode, ChargePolicy
from kvscaler.protocol.state import ExecutorType

from kvscaler_sidecar.config import Settings

EXIT_REFUSED = 78
"""`EX_CONFIG` of sysexits.h: starting again without a change gives the same answer."""

LOADING_THREAD = "load"
"""Name of the thread that loads; while it lives, the process can't end in an orderly way."""

ENGINE_TYPE = "Kvscaler"
BUILTIN = "builtin://"
CGROUP_LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_NO_LIMIT_BYTES = 1 << 60


class StartRefused(Exception):
    """This replica must not start; says which object, why, and what to change."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the replica will be, before it holds a byte of it."""

    folder: Path | None
    """Where the model's files are; `None` when the executor reads none."""
    architecture: ModelArchitecture
    budget: KVBudget
    policy: AdmissionPolicy
    overrides: dict[str, Any]

    def limits(self, kv_blocks: int) -> AdmissionLimits:
        """The replica's own limits over a pool of `kv_blocks`."""
        limits = admission_limits(self.budget, self.policy, calibrated_blocks=kv_blocks)
        return limits.model_copy(update=self.overrides)


def plan_start(
    settings: Settings, compute_dtype: str, memory_limit_bytes: int | None = None
) -> Plan:
    """Facts, budget and limits of this replica.

    `compute_dtype` is what the executor will compute in on this machine, `memory_limit_bytes` the
    limit of the container's cgroup, if any. Raises `StartRefused`.
    """
    folder, architecture = _facts(settings)
    try:
        accelerator = hardware.find(settings.accelerator)
        accelerator = accelerator.with_memory(settings.memory_bytes)
        budget = compute_budget(
            architecture,
            accelerator,
            profile_for(ENGINE_TYPE, accelerator),
            EngineSettings(
                memory_utilization_percent=settings.memory_utilization_percent,
                max_context_tokens=settings.max_context_tokens or None,
                max_sequences=settings.limits.get("max_sequences"),
                step_tokens=settings.limits.get("step_tokens"),
                block_tokens=settings.block_tokens,
                compute_dtype=compute_dtype,
                kv_dtype=AUTO if settings.cache_dtype == AUTO else settings.cache_dtype,
            ),
        )
    except (hardware.UnknownAccelerator, BudgetUnknown, UnknownEngine, ValueError) as error:
        raise StartRefused(f"no budget for {settings.model_uri}: {error}") from error
    if not budget.fit.fits:
        raise StartRefused(f"{settings.model_uri} {budget.fit.message}")
    if (
        accelerator.device == "cpu"
        and memory_limit_bytes is not None
        and budget.total_bytes > memory_limit_bytes
    ):
        raise StartRefused(
            f"the memory limit of this container is {gib(memory_limit_bytes)}, and "
            f"{settings.model_uri} is planned to use {gib(budget.total_bytes)} of "
            f"{gib(settings.memory_bytes)} (KVSCALER_MEMORY_BYTES): raise the container's "
            "memory limit, or lower KVSCALER_MEMORY_BYTES to it"
        )
    policy, overrides = limits_policy(settings.limits)
    return Plan(folder, architecture, budget, policy, overrides)


def _facts(settings: Settings) -> tuple[Path | None, ModelArchitecture]:
    """The model's files and what they say; a modelled replica may know it from the catalogue."""
    if settings.executor is not ExecutorType.MODELLED:
        folder = model_folder(settings)
        return folder, _architecture(settings, folder)
    try:
        return None, catalogue.find(settings.model_uri).architecture
    except UnknownModel as error:
        unknown = error
    try:
        return None, _architecture(settings, model_folder(settings))
    except StartRefused as error:
        raise StartRefused(
            f"executor {settings.executor} knows nothing about the model: {unknown}; and {error}"
        ) from error


def model_folder(settings: Settings) -> Path:
    """The folder with the model's files."""
    uri = settings.model_uri
    if uri.startswith(BUILTIN):
        return settings.models_dir / uri.removeprefix(BUILTIN).split("?", 1)[0]
    if uri.startswith("/"):
        return Path(uri)
    raise StartRefused(
        f"model {uri!r} can't be loaded by this engine: it takes builtin://NAME "
        f"(a folder in {settings.models_dir}) or an absolute path"
    )


def _architecture(settings: Settings, folder: Path) -> ModelArchitecture:
    config = folder / "config.json"
    try:
        return ModelArchitecture.from_config(json.loads(config.read_text("utf-8")))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        # ModelNotUnderstood is a ValueError, as is broken JSON
        raise StartRefused(f"model {settings.model_uri}: {config}: {error}") from error
    try:
        known = catalogue.find(settings.model_uri)
    except UnknownModel as error:
        raise StartRefused(f"model {settings.model_uri}: no {config}, and {error}") from error
    raise StartRefused(
        f"model {settings.model_uri}: {known.name} is known, but its files are not in {folder}: "
        "use an image that holds them, or set KVSCALER_MODELS_DIR"
    )


def limits_policy(limits: Any) -> tuple[AdmissionPolicy, dict[str, Any]]:
    """What `KVSCALER_LIMITS` decides: the policy's fields, and limits that replace computed ones."""
    policy = AdmissionPolicy()
    overrides: dict[str, Any] = {}
    try:
        for name, value in limits.items():
            match name:
                case "mode":
                    policy = replace(policy, mode=AdmissionMode(value))
                case "charge":
                    policy = replace(policy, charge=ChargePolicy(value))
                case "queue_requests":
                    policy = replace(policy, queue_requests=_count(value))
                case "max_wait_seconds":
                    policy = replace(policy, max_wait_seconds=_amount(value))
                case "watermark_percent":
                    policy = replace(policy, watermark_percent=_amount(value))
                case "queue_tokens" | "queue_bytes" | "watermark_blocks":
                    overrides[name] = _count(value)
    except (TypeError, ValueError) as error:
        raise StartRefused(f"KVSCALER_LIMITS: {name}: {error}") from error
    return policy, overrides


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a number of 0 or more")
    return value


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{value!r} is not a number of 0 or more")
    return float(value)


def container_memory_limit_bytes(files: tuple[Path, ...] = CGROUP_LIMIT_FILES) -> int | None:
    """The memory limit of this process's cgroup, `None` when there is none."""
    for path in files:
        try:
            text = path.read_text("ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
            return int(text)
        return None
    return None


def leave_message(path: Path, message: str) -> None:
    """Write the termination message, if this is a container that has one."""
    try:
        if path.exists():
            path.write_text(message[:4096], "utf-8")
    except OSError:
        # The message is on standard error as well; a read-only file must not change the exit code.
        return
