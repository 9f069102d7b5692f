"""The command `kvscaler-operator`."""

import asyncio
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence

from kvscaler_operator.app import Operator
from kvscaler_operator.lease import LeaseLostError
from kvscaler_operator.settings import Settings, SettingsError, parse_arguments

logger = logging.getLogger("kvscaler_operator")

LOST = 3
"""Exit status when the Lease was lost: someone else may act now."""
MISUSED = 2


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; a trace goes into one field."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(settings: Settings) -> None:
    """Log to standard error; Kopf's chatter about objects only from warnings on."""
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for noisy in ("kopf", "aiohttp.access", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def spare_collector() -> None:
    """Have no later collection walk through what lasts: of a thousand Pods that takes a second, in
    which nothing else runs. What objects are made of are trees, which go when nobody holds them."""
    gc.collect(1)
    gc.freeze()


async def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(Operator(settings, settled=spare_collector).run(stop))

    def end() -> None:
        stop.set()
        # Before the Lease is ours there is nobody to look at `stop`.
        loop.call_later(10.0, running.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    try:
        await running
    except asyncio.CancelledError:
        return 0
    except LeaseLostError as error:
        logger.error("%s", error)
        return LOST
    except Exception:
        logger.exception("The operator stops")
        return 1
    finally:
        waiting.cancel()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator with the flags of a command line."""
    try:
        settings = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    except SettingsError as error:
        print(f"kvscaler-operator: {error}", file=sys.stderr)
        return MISUSED
    configure_logging(settings)
    logger.info(
        "Serving %s; signals from %s",
        ", ".join(settings.namespaces) or "all namespaces",
        " and ".join(sorted(settings.signal_paths)),
    )
    return asyncio.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
