"""The built-in catalogue: facts of popular models, each with its source.

It spares the operator from fetching model files, and a first replica from being started blind.
"""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from kvscaler.models.architecture import ModelArchitecture
from kvscaler.models.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One known model."""

    name: str
    uris: tuple[str, ...]
    source: str
    architecture: ModelArchitecture


@cache
def entries() -> tuple[CatalogueEntry, ...]:
    """All entries of the catalogue file, in its order."""
    rows = json.loads(files("kvscaler.models").joinpath("catalogue.json").read_text("utf-8"))
    return tuple(
        CatalogueEntry(
            row["name"],
            tuple(row["uris"]),
            row["source"],
            ModelArchitecture.from_config(row["config"]),
        )
        for row in rows
    )


def find(name_or_uri: str) -> CatalogueEntry:
    """The entry with this name or URI (a `@revision` or `?query` tail does not matter).

    Raises `UnknownModel` with the names that come near: a Pod's last words have room for few.
    """
    wanted = name_or_uri.split("@", 1)[0].split("?", 1)[0].casefold()
    for entry in entries():
        if wanted in {entry.name, *(uri.casefold() for uri in entry.uris)}:
            return entry
    names = [entry.name for entry in entries()]
    near = get_close_matches(wanted.rsplit("/", 1)[-1], names) or names[:2]
    raise UnknownModel(
        f"model {name_or_uri!r} is not in the catalogue of {len(names)} models, such as "
        f"{', '.join(near)}; give its facts inline or as a config.json"
    )
