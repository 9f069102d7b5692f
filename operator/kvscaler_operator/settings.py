"""All settings of the operator, each with what it is for, and where they are read from.

Every setting is a flag and a variable: `--tick-seconds` is `KVSCALER_TICK_SECONDS`. A flag wins.
Prometheus servers have addresses and credentials, and live in a file: users of the API name a
server, and never give a URL.
"""

import argparse
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from kvscaler_operator.gateways.prometheus import PrometheusServer
from kvscaler_operator.signals import SignalPath


class SettingsError(Exception):
    """A setting that can't be used: which, why, and what is accepted."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _paths(text: str) -> frozenset[SignalPath]:
    known = {path.value for path in SignalPath}
    wanted = set(_names(text))
    if not wanted or wanted - known:
        raise ValueError(f"must be one or more of {', '.join(sorted(known))}, comma-separated")
    return frozenset(SignalPath(name) for name in wanted)


def _optional_path(text: str) -> Path | None:
    return Path(text) if text else None


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be a number of seconds above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise ValueError("must be a port, 0 to 65535")
    return value


def _choice(*known: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return text

    return parse


def _setting(parse: Callable[[str], Any], text: str, default: Any) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings, by name. The `help` of each says what it is for."""

    namespaces: tuple[str, ...] = _setting(
        _names, "namespaces to serve, comma-separated; none serves all", ()
    )
    release_namespace: str = _setting(str, "namespace of the operator's Lease", "kvscaler-system")
    lease_name: str = _setting(str, "name of the Lease", "kvscaler-operator")
    pod_name: str = _setting(str, "identity that holds the Lease", socket.gethostname())
    kubeconfig: str = _setting(str, "kubeconfig file; none uses the Pod's service account", "")
    context: str = _setting(str, "context of the kubeconfig; none takes its current one", "")
    signal_paths: frozenset[SignalPath] = _setting(
        _paths,
        "ways to observe replicas: direct, prometheus or both",
        frozenset({SignalPath.DIRECT, SignalPath.PROMETHEUS}),
    )
    prometheus_config: Path | None = _setting(  # noqa: RUF009
        _optional_path, "YAML file with the Prometheus servers by name", None
    )
    tick_seconds: float = _setting(_seconds, "time between two direct passes over replicas", 1.0)
    prometheus_seconds: float = _setting(_seconds, "time between two passes over Prometheus", 5.0)
    signal_max_age_seconds: float = _setting(
        _seconds, "age at which a replica's last report no longer speaks for it", 20.0
    )
    relist_seconds: float = _setting(_seconds, "time between two lists of every kind", 60.0)
    key_file: Path | None = _setting(  # noqa: RUF009
        _optional_path, "Ed25519 private key (PEM) that signs admin tokens", None
    )
    sidecar_image: str = _setting(
        str, "image of new services' Pods", "docker.io/local/kvscaler-sidecar:dev"
    )
    image_pull_policy: str = _setting(
        _choice("Always", "IfNotPresent", "Never"), "pull policy of that image", "IfNotPresent"
    )
    workers: int = _setting(_count, "services reconciled at a time", 16)
    writes_per_second: float = _setting(_seconds, "average rate of writes to the API server", 50.0)
    state_port: int = _setting(_port, "port of a replica's /state", 9090)
    admin_port: int = _setting(_port, "port of a replica's admin API", 9443)
    metrics_port: int = _setting(_port, "port of the operator's own /metrics", 8080)
    probe_port: int = _setting(_port, "port of /healthz and /readyz", 8081)
    lease_duration_seconds: float = _setting(
        _seconds, "time after which a dead holder's Lease is taken over", 15.0
    )
    log_format: str = _setting(_choice("text", "json"), "text or json", "text")
    log_level: str = _setting(
        _choice("debug", "info", "warning", "error"), "least level that is logged", "info"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; values stay text until `load` parses them."""
    for setting in fields(Settings):
        default = setting.default
        if isinstance(default, (tuple, frozenset)):
            default = ",".join(sorted(default)) or "none"
        parser.add_argument(
            _flag(setting.name),
            dest=setting.name,
            metavar=setting.name.rsplit("_", 1)[-1].upper(),
            help=f"{setting.metadata['help']} (default {default or 'none'}; "
            f"{_variable(setting.name)})",
        )


def load(
    flags: Mapping[str, str | None] | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """Settings from flags, then variables, then defaults.

    Raises `SettingsError` that lists everything wrong at once.
    """
    flags = flags or {}
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    problems: list[str] = []
    for setting in fields(Settings):
        text, source = flags.get(setting.name), _flag(setting.name)
        if text is None:
            text, source = environment.get(_variable(setting.name)), _variable(setting.name)
        if text is None:
            continue
        try:
            values[setting.name] = setting.metadata["parse"](text)
        except ValueError as error:
            problems.append(f"{source}={text!r}: {error}")
    if problems:
        raise SettingsError("; ".join(problems))
    return Settings(**values)


def parse_arguments(arguments: Sequence[str]) -> Settings:
    """Settings from a command line without the program's name."""
    parser = argparse.ArgumentParser(
        prog="kvscaler-operator", description="The operator of kvscaler: reconciles kvis objects."
    )
    add_arguments(parser)
    return load(vars(parser.parse_args(arguments)))


_SERVER_KEYS: Mapping[str, str] = {
    "url": "url",
    "bearerTokenFile": "bearer_token_file",
    "caFile": "ca_file",
    "certificateFile": "certificate_file",
    "keyFile": "key_file",
    "headers": "headers",
}


def prometheus_servers(path: Path | None) -> dict[str, PrometheusServer]:
    """Servers by name from a file such as `servers: {default: {url: http://prometheus:9090}}`.

    Raises `SettingsError` naming the file and the entry.
    """
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read the Prometheus servers from {path}: {error}") from error
    servers = content.get("servers") if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise SettingsError(f"{path} must hold a map `servers` of name to settings")
    return {str(name): _server(str(name), entry, path) for name, entry in servers.items()}


def _server(name: str, entry: Any, path: Path) -> PrometheusServer:
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
        raise SettingsError(f"{path}: server {name!r} needs a url")
    if not entry["url"].startswith(("http://", "https://")):
        raise SettingsError(f"{path}: url of server {name!r} must begin with http:// or https://")
    unknown = sorted(set(entry) - set(_SERVER_KEYS))
    if unknown:
        raise SettingsError(
            f"{path}: server {name!r} knows no {', '.join(unknown)}; it takes {sorted(_SERVER_KEYS)}"
        )
    values: dict[str, Any] = {_SERVER_KEYS[key]: value for key, value in entry.items()}
    for key in ("bearer_token_file", "ca_file", "certificate_file", "key_file"):
        if key in values:
            values[key] = Path(values[key])
    return PrometheusServer(name=name, **values)


def _variable(name: str) -> str:
    return f"KVSCALER_{name.upper()}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
