"""`kvscaler-sidecar`: the command line of the serving process."""

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvloop
from kvscaler import __version__

from kvscaler_sidecar import logs
from kvscaler_sidecar.config import (
    EXAMPLES,
    ConfigurationError,
    Settings,
    add_arguments,
    load,
)
from kvscaler_sidecar.start import (
    EXIT_REFUSED,
    LOADING_THREAD,
    Plan,
    StartRefused,
    container_memory_limit_bytes,
    leave_message,
    plan_start,
)

if TYPE_CHECKING:
    from kvscaler_sidecar.replica import Loader

log = logging.getLogger(__name__)

EXIT_PORT_TAKEN = 69
_OWN_FLAGS = frozenset({"-h", "--help", "--version"})


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
        help="serve a model",
        description="Serve a model on three ports: OpenAI API, metrics and state, admin API.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(serve_parser)
    flags = vars(parser.parse_args(arguments))
    flags.pop("command")
    try:
        settings = load(flags)
    except ConfigurationError as error:
        print(f"kvscaler-sidecar: {error}", file=sys.stderr)
        return EXIT_REFUSED
    logs.configure(settings.log_level)
    return serve(settings)


def serve(settings: Settings) -> int:
    """Serve until told to stop; the exit code."""
    # Imported late: help and wrong options need not wait for the libraries of a model.
    from kvscaler_sidecar.loader import TorchLoader  # noqa: PLC0415

    try:
        loader = TorchLoader.for_machine(settings)
        plan = plan_start(settings, loader.compute.name, container_memory_limit_bytes())
    except StartRefused as error:
        log.error("refused to start", extra={"why": str(error)})
        leave_message(settings.termination_log, str(error))
        return EXIT_REFUSED
    code: int = uvloop.run(_serve(settings, plan, loader))
    if any(thread.name == LOADING_THREAD for thread in threading.enumerate()):
        # Told to stop while loading: native code can't be interrupted, and unloading it under a
        # running thread aborts the process. Nothing was accepted, so nothing is lost.
        logging.shutdown()
        os._exit(code)
    return code


async def _serve(settings: Settings, plan: Plan, loader: "Loader") -> int:
    from kvscaler_sidecar.replica import Replica  # noqa: PLC0415
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
    replica = Replica(settings, plan, loader, sockets)
    code = await replica.run()
    if code:
        leave_message(settings.termination_log, replica.last_words)
    return code


if __name__ == "__main__":
    sys.exit(main())
