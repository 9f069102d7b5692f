"""`kvscaler-sidecar`: the command line of the serving process."""

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import uvloop
from kvscaler import __version__
from kvscaler.protocol.state import ExecutorType

from kvscaler_sidecar import logs
from kvscaler_sidecar.config import (
    EXAMPLES,
    ConfigurationError,
    GateSettings,
    ProcessSettings,
    Settings,
    add_arguments,
    load,
    load_table,
)
from kvscaler_sidecar.start import (
    EXIT_REFUSED,
    LOADING_THREAD,
    StartRefused,
    container_memory_limit_bytes,
    leave_message,
    limits_policy,
    plan_start,
)

if TYPE_CHECKING:
    from kvscaler_sidecar.loader import TorchLoader
    from kvscaler_sidecar.modelled_loader import ModelledLoader
    from kvscaler_sidecar.process import ServingProcess

log = logging.getLogger(__name__)

EXIT_NOT_DRAINED = 1
EXIT_PORT_TAKEN = 69
_OWN_FLAGS = frozenset({"-h", "--help", "--version"})


class Mode(StrEnum):
    """What this process is."""

    ENGINE = "engine"
    GATE = "gate"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="kvscaler-sidecar",
        description="A paged LLM engine behind an OpenAI server, with memory-aware admission.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in _OWN_FLAGS):
        # A container that is configured by variables alone, or by flags in a Pod's `args`.
        arguments.insert(0, "serve")
    serve_parser = commands.add_parser(
        "serve",
        help="serve a model, or gate an engine that does",
        description="Serve a model on three ports: OpenAI API, metrics and state, admin API.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what a flag says must be plain to whoever reads a Pod's arguments
    )
    mode = _mode(arguments)
    serve_parser.add_argument(
        "--mode",
        choices=[str(known) for known in Mode],
        default=str(Mode.ENGINE),
        help="engine runs our engine in this process; gate stands before another engine in the "
        "same Pod (default engine; KVSCALER_MODE); --mode gate --help has its options",
    )
    add_arguments(serve_parser, GateSettings if mode is Mode.GATE else Settings)
    wait_parser = commands.add_parser(
        "wait-drained",
        help="wait until a sidecar has drained; a preStop command for the engine behind it",
        description="Ends with 0 when the sidecar has nothing left to answer, or is gone.",
    )
    wait_parser.add_argument("--url", default="http://127.0.0.1:9090", help="its metrics port")
    wait_parser.add_argument(
        "--timeout-seconds", type=float, default=3600.0, help="longest time to wait (3600)"
    )
    flags = vars(parser.parse_args(arguments))
    if flags.pop("command") == "wait-drained":
        return wait_drained(flags["url"], flags["timeout_seconds"])
    flags.pop("mode")
    try:
        if mode is Mode.GATE:
            gate_settings = load_table(GateSettings, flags)
            logs.configure(gate_settings.log_level)
            return gate(gate_settings)
        settings = load(flags)
    except ConfigurationError as error:
        print(f"kvscaler-sidecar: {error}", file=sys.stderr)
        return EXIT_REFUSED
    logs.configure(settings.log_level)
    return serve(settings)


def _mode(arguments: Sequence[str]) -> Mode:
    """What `--mode` or `KVSCALER_MODE` says; the parser complains about what is neither."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--mode", default=os.environ.get("KVSCALER_MODE") or str(Mode.ENGINE))
    found = str(finder.parse_known_args(arguments)[0].mode)
    return Mode(found) if found in list(Mode) else Mode.ENGINE


def serve(settings: Settings) -> int:
    """Serve until told to stop; the exit code."""
    try:
        loader = _loader(settings)
        plan = plan_start(settings, loader.compute_dtype, container_memory_limit_bytes())
    except StartRefused as error:
        return _refuse(settings, error)

    def make(sockets: dict[str, socket.socket]) -> "ServingProcess":
        from kvscaler_sidecar.replica import Replica  # noqa: PLC0415

        return Replica(settings, plan, loader, sockets)

    code: int = uvloop.run(_serve(settings, make))
    if any(thread.name == LOADING_THREAD for thread in threading.enumerate()):
        # Told to stop while loading: native code can't be interrupted, and unloading it under a
        # running thread aborts the process. Nothing was accepted, so nothing is lost.
        logging.shutdown()
        os._exit(code)
    return code


def _loader(settings: Settings) -> "TorchLoader | ModelledLoader":
    """What makes the executor. Imported late: help and wrong options need not wait for the
    libraries of a model, and a modelled replica never loads them."""
    if settings.executor is ExecutorType.MODELLED:
        from kvscaler_sidecar.modelled_loader import ModelledLoader  # noqa: PLC0415

        return ModelledLoader(time.monotonic(), compute_dtype=settings.compute_dtype)
    from kvscaler_sidecar.loader import TorchLoader  # noqa: PLC0415

    return TorchLoader.for_machine(settings)


def gate(settings: GateSettings) -> int:
    """Stand before another engine until told to stop; the exit code. Never imports torch."""
    from kvscaler_sidecar.gate.adapters import adapter_for  # noqa: PLC0415
    from kvscaler_sidecar.gate.process import Gate  # noqa: PLC0415

    try:
        adapter = adapter_for(settings.engine_type)
        policy, overrides = limits_policy(settings.limits)
    except StartRefused as error:
        return _refuse(settings, error)
    made: int = uvloop.run(
        _serve(settings, lambda sockets: Gate(settings, adapter, policy, overrides, sockets))
    )
    return made


def wait_drained(url: str, timeout_seconds: float) -> int:
    """Wait for the drain of the sidecar at `url`; 0 when it is over or the sidecar is gone."""
    from kvscaler_sidecar.server.observe import DRAIN_WAIT_PATH  # noqa: PLC0415

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a wait that was cut short is no drain
    try:
        with urllib.request.urlopen(  # noqa: S310 - the command's own argument
            url.rstrip("/") + DRAIN_WAIT_PATH, timeout=timeout_seconds
        ) as answer:
            print(answer.read(1000).decode(errors="replace").strip())
            return 0
    except urllib.error.HTTPError as error:
        print(error.read(1000).decode(errors="replace").strip(), file=sys.stderr)
        return EXIT_NOT_DRAINED
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionError):
            print(f"nothing to wait for: {url}: {error.reason}")
            return 0
        print(f"{url}: {error.reason}", file=sys.stderr)
        return EXIT_NOT_DRAINED
    except ConnectionError as error:
        print(f"the sidecar ended: {error}")
        return 0
    except (OSError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return EXIT_NOT_DRAINED


def _refuse(settings: ProcessSettings, error: StartRefused) -> int:
    log.error("refused to start", extra={"why": str(error)})
    leave_message(settings.termination_log, str(error))
    return EXIT_REFUSED


async def _serve(
    settings: ProcessSettings, make: "Callable[[dict[str, socket.socket]], ServingProcess]"
) -> int:
    from kvscaler_sidecar.server.listeners import bind  # noqa: PLC0415

    ports = {
        "http": settings.http_port,
        "metrics": settings.metrics_port,
        "admin": settings.admin_port,
    }
    sockets = {}
    try:
        for name, port in ports.items():
            sockets[name] = bind(settings.host, port)
    except OSError as error:
        log.error("refused to start", extra={"why": str(error)})
        leave_message(settings.termination_log, str(error))
        return EXIT_PORT_TAKEN
    process = make(sockets)
    code = await process.run()
    if code:
        leave_message(settings.termination_log, process.last_words)
    return code


if __name__ == "__main__":
    sys.exit(main())
