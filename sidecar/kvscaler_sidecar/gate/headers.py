"""Which header fields pass a gate: all but those of one connection (RFC 9110, section 7.6.1).

Values pass byte for byte, in their order, repeated fields included; names of requests pass in
lower case, in which they mean the same. A gateway says in `Via` that it was there (section 7.6.3).
"""

from collections.abc import Iterable, Sequence

Headers = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
    | {b"upgrade"}
)
VIA = (b"via", b"1.1 kvscaler-gate")
BODILESS_STATUSES = frozenset({204, 304})


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """`headers` without those that concern one connection only."""
    headers = list(headers)
    dropped = set(HOP_BY_HOP)
    for name, value in headers:
        if name.lower() == b"connection":
            dropped.update(token.strip().lower() for token in value.split(b","))
    # What frames the message can't be named away: it would leave its end unknown.
    dropped.discard(b"content-length")
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def request_head(
    method: str, target: bytes, headers: Headers, *, body_bytes: int | None, host: bytes
) -> bytes:
    """The first lines of the request to the engine.

    `body_bytes` is the length of a body that is at hand, `None` for one that is passed as it
    comes: by the length that the client told, or in chunks.
    """
    passed = [(n, v) for n, v in end_to_end(headers) if n != b"expect"]
    if body_bytes is not None:
        passed = [(n, v) for n, v in passed if n != b"content-length"]
        passed.append((b"content-length", b"%d" % body_bytes))
    elif is_chunked(headers):
        passed.append((b"transfer-encoding", b"chunked"))
    if not any(name == b"host" for name, _ in passed):
        passed.insert(0, (b"host", host))
    passed.append(VIA)
    lines = [b"%s %s HTTP/1.1" % (method.encode("ascii"), target)]
    lines += [b"%s: %s" % pair for pair in passed]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def value_of(headers: Headers, wanted: bytes) -> bytes | None:
    """The first value of a field; `wanted` in lower case."""
    return next((value for name, value in headers if name.lower() == wanted), None)


def is_chunked(headers: Headers) -> bool:
    """Whether the body comes in chunks."""
    coding = value_of(headers, b"transfer-encoding")
    return coding is not None and coding.strip().lower() == b"chunked"


def asks_for_websocket(headers: Headers) -> bool:
    """Whether this is the opening of a WebSocket."""
    return any(
        name.lower() == b"upgrade" and b"websocket" in value.lower() for name, value in headers
    )
