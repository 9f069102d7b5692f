"""Log lines: one JSON object each, bounded in length and, under a permanent fault, in number."""

import io
import json
import logging

import pytest
from kvscaler_sidecar import logs


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    handler.addFilter(logs.Bounded())
    logger = logging.getLogger("test-of-logs")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel("INFO")
    return stream


def test_a_line_is_json_with_its_extras(lines: io.StringIO) -> None:
    logging.getLogger("test-of-logs").info("refused", extra={"reason": "QueueFull", "count": 3})
    line = json.loads(lines.getvalue())
    assert (line["message"], line["level"]) == ("refused", "info")
    assert (line["reason"], line["count"]) == ("QueueFull", 3)


def test_a_permanent_fault_makes_a_bounded_log(lines: io.StringIO) -> None:
    logger = logging.getLogger("test-of-logs")
    for number in range(10_000):
        logger.warning("request %d failed" + "!" * 5000, number)
    logger.warning("something else")
    written = lines.getvalue().splitlines()
    assert len(written) == logs.LINES_PER_MESSAGE + 1
    assert max(map(len, written)) < logs.MAX_LINE_CHARACTERS + 500


def test_an_exception_stays_in_one_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("no\nsuch thing")
    except ValueError:
        logging.getLogger("test-of-logs").exception("failed")
    assert len(lines.getvalue().splitlines()) == 1
    assert "no\nsuch thing" in json.loads(lines.getvalue())["exception"]
