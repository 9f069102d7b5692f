"""Stop strings: what is sent never holds a part of one, however the text is cut."""

from hypothesis import given
from hypothesis import strategies as st
from kvscaler_sidecar.server.stops import StopStrings

letters = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


@given(letters, stop_lists, st.lists(st.integers(min_value=0, max_value=4), max_size=20))
def test_pieces_add_up_to_the_text_before_the_earliest_stop(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    scanner = StopStrings(stops)
    sent, ended = "", len(text)
    for length, piece in enumerate(cut(text, sizes)):
        sent += scanner.feed(piece)
        if scanner.matched is not None:
            ended = sum(len(p) for p in cut(text, sizes)[: length + 1])
            break
    if scanner.matched is None:
        sent += scanner.flush()
    seen = text[:ended]
    ends = [seen.find(stop) for stop in stops if stop in seen]
    assert sent == (seen[: min(ends)] if ends else text)
    assert (scanner.matched is not None) == bool(ends)


@given(letters, stop_lists)
def test_a_match_is_found_in_the_piece_that_completes_it(text: str, stops: list[str]) -> None:
    scanner = StopStrings(stops)
    for position, letter in enumerate(text):
        scanner.feed(letter)
        complete = any(stop in text[: position + 1] for stop in stops)
        assert (scanner.matched is not None) == complete
        if complete:
            return


def test_held_text_comes_out_when_it_was_no_stop() -> None:
    scanner = StopStrings(["END"])
    assert scanner.feed("the E") == "the "
    assert scanner.feed("N") == ""
    assert scanner.feed("T") == "ENT"
    assert scanner.feed("EN") == ""
    assert scanner.flush() == "EN"
