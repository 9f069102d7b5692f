"""Log lines as one JSON object each, and a bound on how many of them a fault can make.

A replica that refuses ten thousand requests says so in its metrics; its log says it a few times.
"""

import json
import logging
import sys
import time
from typing import Any, TextIO

LINES_PER_MESSAGE = 20
WINDOW_SECONDS = 60.0
MAX_LINE_CHARACTERS = 2000

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", ...extra}` in one line of bounded length."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for `record`."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MAX_LINE_CHARACTERS],
        }
        for key, value in vars(record).items():
            if key not in _STANDARD:
                line[key] = value if isinstance(value, (int, float, bool)) else str(value)[:500]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-MAX_LINE_CHARACTERS:]
        return json.dumps(line, ensure_ascii=False)


class Bounded(logging.Filter):
    """At most `LINES_PER_MESSAGE` lines a minute of one message template; errors included."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is within the bound of its template."""
        key = (record.name, str(record.msg))
        now = time.monotonic()
        start, count = self._seen.get(key, (now, 0))
        if now - start >= WINDOW_SECONDS:
            if count > LINES_PER_MESSAGE:
                record.suppressed = count - LINES_PER_MESSAGE
            start, count = now, 0
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] = (start, count + 1)
        return count < LINES_PER_MESSAGE


def configure(level: str, stream: TextIO = sys.stderr) -> None:
    """Send everything of this process to `stream`, one JSON object a line."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(Bounded())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    logging.getLogger("uvicorn.access").setLevel("WARNING")
