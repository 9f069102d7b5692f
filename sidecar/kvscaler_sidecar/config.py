"""What the sidecar can be told: one table of options, each a flag and an environment variable.

The operator sets the variables on the container; a person at a terminal uses the flags. Both come
from the same table, so neither can have an option that the other lacks. A flag wins over its
variable.
"""

# ruff: noqa: RUF009  (`_option` makes a field, and Paths are immutable)

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvscaler.budget.settings import AUTO, CPU_COMPUTE_DTYPES
from kvscaler.protocol.state import ExecutorType

LIMIT_OVERRIDES = frozenset(
    {"charge", "watermark_percent", "queue_requests", "queue_tokens", "queue_bytes"}
    | {"watermark_blocks", "max_wait_seconds", "mode", "max_sequences", "step_tokens"}
)
"""Fields that `KVSCALER_LIMITS` may set; what memory decides is never among them."""


MAX_TIME_SCALE = 1000.0
"""A step of an H100 then takes half a minute: the engine still shows that it lives."""

MODELLED_OPTIONS = ("time_scale", "modelled_start_seconds", "modelled_output_tokens")
"""Options of the executor Modelled: with another they would be ignored, so they are refused."""


class ConfigurationError(Exception):
    """An option that can't be used: says which, why, and what is accepted."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def _executor(text: str) -> ExecutorType:
    try:
        return ExecutorType(text)
    except ValueError:
        raise ValueError(f"there is no such executor; use {' or '.join(ExecutorType)}") from None


def _compute_dtype(text: str) -> str:
    if text not in CPU_COMPUTE_DTYPES:
        raise ValueError(f"must be one of {', '.join(CPU_COMPUTE_DTYPES)}")
    return text


def _scale(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_TIME_SCALE:
        raise ValueError(f"must be a number above 0, at most {MAX_TIME_SCALE:g}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError("must be a port, 0 to 65535")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be a number of seconds, 0 or more")
    return value


def _percent(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 100:
        raise ValueError("must be 1 to 100")
    return value


def _switch(text: str) -> bool:
    table = {"enabled": True, "disabled": False, "true": True, "false": False}
    if text.lower() not in table:
        raise ValueError("must be Enabled or Disabled")
    return table[text.lower()]


def _loopback(text: str) -> str:
    url = urlsplit(text)
    if url.scheme != "http" or url.path.strip("/") or url.query or url.username is not None:
        raise ValueError("must be http://ADDRESS:PORT and nothing more")
    try:
        local = url.hostname is not None and ip_address(url.hostname).is_loopback
    except ValueError:
        local = False
    if not local or not url.port:
        raise ValueError(
            "must have a loopback address and a port, such as http://127.0.0.1:8001: the engine "
            "of a gate is in the same Pod and listens to nobody else"
        )
    return f"http://{url.netloc}"


def _limits(text: str) -> dict[str, Any]:
    value = json.loads(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    unknown = sorted(set(value) - LIMIT_OVERRIDES)
    if unknown:
        raise ValueError(f"knows no {', '.join(unknown)}; it takes {sorted(LIMIT_OVERRIDES)}")
    return value


def _option(parse: Callable[[str], Any], help_text: str, default: Any = MISSING) -> Any:
    metadata = {"parse": parse, "help": help_text}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Options of every mode.

    The variable of an option is `KVSCALER_` and its name in capitals, its flag the name with
    dashes: `memory_bytes` is `KVSCALER_MEMORY_BYTES` and `--memory-bytes`.
    """

    limits: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={
            "parse": _limits,
            "help": 'admission settings as JSON, such as {"charge": "Expected"}',
        },
    )
    service_uid: str = _option(str, "UID of the InferenceService", "standalone")
    service_name: str = _option(str, "name of the InferenceService", "standalone")
    namespace: str = _option(str, "namespace of the Pod", "default")
    pod_uid: str = _option(str, "UID of the Pod", "standalone")
    pod_name: str = _option(str, "name of the Pod", "standalone")
    admin_keys_dir: Path = _option(
        Path, "folder of public keys (*.pem) that may sign admin tokens", Path("/etc/kvscaler/keys")
    )
    drain_timeout_seconds: float = _option(
        _seconds, "longest time that a drain waits for running requests", 600.0
    )
    drain_linger_seconds: float = _option(
        _seconds, "time that a draining replica still accepts, until clients know", 15.0
    )
    max_body_bytes: int = _option(_positive, "longest request body", 8 * 1024 * 1024)
    max_connections: int = _option(_positive, "connections to the OpenAI API at a time", 1024)
    host: str = _option(
        str,
        "address to listen on; 127.0.0.1 for an engine behind a gate",
        "0.0.0.0",  # noqa: S104
    )
    http_port: int = _option(_port, "port of the OpenAI API", 8000)
    metrics_port: int = _option(_port, "port of /metrics, /state and /health", 9090)
    admin_port: int = _option(_port, "port of the admin API", 9443)
    log_level: str = _option(str, "debug, info, warning or error", "info")
    termination_log: Path = _option(
        Path, "file that gets the last words of a refused start", Path("/dev/termination-log")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ProcessSettings):
    """All options of `kvscaler-sidecar serve` with our engine."""

    model_uri: str = _option(str, "model to serve, such as builtin://smollm2-135m")
    memory_bytes: int = _option(
        _positive, "accelerator memory of the engine; on cpu, the container's memory limit"
    )
    served_names: tuple[str, ...] = _option(
        _names, "names that requests may use, comma-separated (default: from the URI)", ()
    )
    models_dir: Path = _option(Path, "folder that builtin:// models are in", Path("/models"))
    max_context_tokens: int = _option(
        _count, "longest prompt plus output; 0 takes the model's own", 0
    )
    block_tokens: int = _option(_positive, "tokens in one KV block", 16)
    cache_dtype: str = _option(str, "data type of the KV cache; Auto never quantizes", AUTO)
    prefix_caching: bool = _option(_switch, "Enabled or Disabled", True)
    memory_utilization_percent: float = _option(_percent, "share of the memory to use", 90)
    accelerator: str = _option(str, "name in the accelerator table", "cpu")
    executor: ExecutorType = _option(
        _executor, "what computes the steps: Torch, or Modelled (step times of the accelerator)",
        ExecutorType.TORCH,
    )  # fmt: skip
    time_scale: float = _option(_scale, "stretches all times of the executor Modelled", 1.0)
    modelled_start_seconds: float = _option(
        _seconds, "cold start of the executor Modelled, before the time scale", 0.0
    )
    modelled_output_tokens: int = _option(
        _count, "mean output of the executor Modelled; 0 goes on until max_tokens", 0
    )
    compute_dtype: str = _option(
        _compute_dtype,
        "float32, bfloat16, or Auto: the faster one for this CPU (Modelled: the model's own)",
        AUTO,
    )
    threads: int = _option(_count, "compute threads; 0 takes the CPUs of the container", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings(ProcessSettings):
    """All options of `kvscaler-sidecar serve --mode gate`."""

    engine_url: str = _option(
        _loopback, "the engine behind the gate, such as http://127.0.0.1:8001"
    )
    engine_metrics_url: str = _option(
        _loopback, "where the engine's metrics pages are", "http://127.0.0.1:9091"
    )
    engine_type: str = _option(str, "what the engine is; only Kvscaler is built", "Kvscaler")
    engine_connect_seconds: float = _option(
        _seconds, "time in which the engine must accept a connection", 5.0
    )
    engine_silence_seconds: float = _option(
        _seconds, "time that the engine may send nothing while it answers", 600.0
    )


Table = TypeVar("Table", bound=ProcessSettings)


EXAMPLES = """\
examples:
  # the model of the image, in 2 GiB of memory, for a try on this machine
  kvscaler-sidecar serve --model-uri builtin://smollm2-135m --memory-bytes 2147483648

  # the same by variables, as the operator does it
  KVSCALER_MODEL_URI=builtin://smollm2-135m KVSCALER_MEMORY_BYTES=2147483648 \\
    kvscaler-sidecar serve

  # a dry run of an H100 with Llama-3.1-8B: its memory and its step times, synthetic tokens
  kvscaler-sidecar serve --executor Modelled --accelerator h100 --memory-bytes 85018877624 \\
    --model-uri hf://meta-llama/Llama-3.1-8B-Instruct --time-scale 2

  # a small pool that charges each request its max_tokens and lets 8 wait
  kvscaler-sidecar serve --model-uri builtin://smollm2-135m --memory-bytes 1073741824 \\
    --limits '{"charge": "WorstCase", "queue_requests": 8}'

  # a gate before an engine of the same Pod
  kvscaler-sidecar serve --mode gate --engine-url http://127.0.0.1:8001

then:
  curl localhost:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 32}'
"""


def variable_name(option: str) -> str:
    """`memory_bytes` -> `KVSCALER_MEMORY_BYTES`."""
    return f"KVSCALER_{option.upper()}"


def flag_name(option: str) -> str:
    """`memory_bytes` -> `--memory-bytes`."""
    return f"--{option.replace('_', '-')}"


def add_arguments(parser: argparse.ArgumentParser, table: type[ProcessSettings] = Settings) -> None:
    """Give `parser` one flag per option; values stay text until `load` parses them."""
    for option in fields(table):
        required = option.default is MISSING and option.default_factory is MISSING
        default = "required" if required else f"default {_shown(option.default)}"
        parser.add_argument(
            flag_name(option.name),
            dest=option.name,
            metavar=option.name.rsplit("_", 1)[-1].upper(),
            help=f"{option.metadata['help']} ({default}; {variable_name(option.name)})".replace(
                "%", "%%"
            ),
        )


def _shown(default: object) -> str:
    if default is MISSING or default in ((), ""):
        return "none"
    if isinstance(default, bool):
        return "Enabled" if default else "Disabled"
    return str(default)


def load(
    flags: Mapping[str, str | None] | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """Settings of a process with our engine.

    Raises `ConfigurationError` that lists everything wrong at once.
    """
    settings = load_table(Settings, flags, environment)
    if settings.executor is not ExecutorType.MODELLED:
        misplaced = [
            flag_name(option.name)
            for option in fields(Settings)
            if option.name in MODELLED_OPTIONS and getattr(settings, option.name) != option.default
        ]
        if misplaced:
            raise ConfigurationError(
                f"{', '.join(misplaced)} goes with the executor Modelled, and this one is "
                f"{settings.executor}: remove it, or give {flag_name('executor')} Modelled"
            )
    if not settings.served_names:
        name = settings.model_uri.rstrip("/").rsplit("/", 1)[-1]
        settings = replace(settings, served_names=(name,))
    return settings


def load_table(
    table: type[Table],
    flags: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Table:
    """The options of `table` from flags, then variables, then defaults.

    Raises `ConfigurationError` that lists everything wrong at once.
    """
    flags = flags or {}
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    problems: list[str] = []
    for option in fields(table):
        text, source = flags.get(option.name), flag_name(option.name)
        if text is None:
            source = variable_name(option.name)
            text = environment.get(source)
        if text is None or text == "":
            if option.default is MISSING and option.default_factory is MISSING:
                problems.append(
                    f"{flag_name(option.name)} (or {variable_name(option.name)}) is required: "
                    f"{option.metadata['help']}"
                )
            continue
        try:
            values[option.name] = option.metadata["parse"](text)
        except (ValueError, TypeError) as error:
            problems.append(f"{source}={text!r}: {error}")
    if problems:
        raise ConfigurationError("; ".join(problems))
    return table(**values)


def parse_arguments(arguments: Sequence[str]) -> Settings:
    """Settings from a command line without the program's name; for `serve` and for tests."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    return load(vars(parser.parse_args(arguments)))
