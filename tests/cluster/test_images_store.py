"""The image store and what decides about rebuilds, on small made-up images: no root, no buildah."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from localcluster.steps import ClusterError
from localimages import base, build, containerd, inputs, layout
from localimages.store import REF_NAME, ImageStore

REPOSITORY = "docker.io/local/thing"


def add_blob(store: ImageStore, content: bytes) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    store.blob_path(digest).parent.mkdir(parents=True, exist_ok=True)
    store.blob_path(digest).write_bytes(content)
    return {"digest": digest, "size": len(content)}


def add_image(store: ImageStore, tag: str, *layers: bytes) -> str:
    """An image as buildah leaves it in the store: blobs, then its entry at the index's end."""
    manifest = {
        "schemaVersion": 2,
        "config": add_blob(store, f"config {tag}".encode()),
        "layers": [add_blob(store, layer) for layer in layers],
    }
    entry = add_blob(store, json.dumps(manifest).encode())
    reference = f"{REPOSITORY}:{tag}"
    path = store.folder / "index.json"
    index = json.loads(path.read_text()) if path.exists() else {"manifests": []}
    index["manifests"].append({**entry, "annotations": {REF_NAME: reference}})
    path.write_text(json.dumps(index))
    return reference


def archive_of(store: ImageStore, reference: str, have: set[str]) -> dict[str, bytes]:
    sink = io.BytesIO()
    store.write_archive(store.image(reference), have, sink)
    with tarfile.open(fileobj=io.BytesIO(sink.getvalue())) as archive:
        files = {}
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            files[member.name] = content.read()
        return files


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    (tmp_path / "oci").mkdir()
    return ImageStore(tmp_path / "oci")


def test_a_first_archive_holds_everything_under_the_name_containerd_looks_for(
    store: ImageStore,
) -> None:
    files = archive_of(store, add_image(store, "a", b"base", b"torch", b"app"), set())
    index = json.loads(files["index.json"])
    assert index["manifests"][0]["annotations"] == {"io.containerd.image.name": f"{REPOSITORY}:a"}
    blobs = {content for name, content in files.items() if name.startswith("blobs/")}
    assert {b"base", b"torch", b"app", b"config a"} < blobs
    for name, content in files.items():
        if name.startswith("blobs/sha256/"):
            assert hashlib.sha256(content).hexdigest() == name.removeprefix("blobs/sha256/")


def test_a_code_change_sends_manifest_configuration_and_one_layer(store: ImageStore) -> None:
    first = add_image(store, "a", b"base", b"torch", b"app")
    second = add_image(store, "b", b"base", b"torch", b"app 2")
    have = {blob.digest for blob in store.image(first).blobs}

    blobs = {
        content for name, content in archive_of(store, second, have).items() if "blobs/" in name
    }
    assert len(blobs) == 3
    assert {b"app 2", b"config b"} < blobs


def test_cleaning_keeps_exactly_what_the_kept_images_need(store: ImageStore) -> None:
    add_image(store, "a", b"base", b"old torch", b"app")
    kept = add_image(store, "b", b"base", b"torch", b"app 2")

    freed_bytes = store.keep([kept])
    assert store.references() == [kept]
    assert b"torch" in archive_of(store, kept, set()).values()
    left = {path.read_bytes() for path in (store.folder / "blobs" / "sha256").iterdir()}
    assert {b"base", b"torch", b"app 2", b"config b"} < left
    assert not left & {b"old torch", b"app", b"config a"}
    assert freed_bytes > len(b"old torch" + b"app" + b"config a")


def test_only_the_last_tags_on_the_same_dependencies_are_recent(store: ImageStore) -> None:
    add_image(store, "a", b"base", b"torch", b"app 1")
    b = add_image(store, "b", b"base", b"torch", b"app 2")
    add_image(store, "c", b"base", b"old torch", b"app 3")
    d = add_image(store, "d", b"base", b"torch", b"app 4")
    assert build.recent_tags(store, f"{REPOSITORY}:") == [b, d]

    store.renew(b)
    assert build.recent_tags(store, f"{REPOSITORY}:") == [d, b]


def test_a_lost_layer_is_named_with_the_way_out(store: ImageStore) -> None:
    reference = add_image(store, "a", b"base", b"app")
    store.blob_path(hashlib.sha256(b"base").hexdigest()).unlink()
    with pytest.raises(ClusterError, match=r"layer sha256:.* is missing .* run hack/images/build"):
        store.image(reference)


def test_an_image_that_was_never_built_is_named(store: ImageStore) -> None:
    with pytest.raises(ClusterError, match=r"thing:z: not in .*; run hack/images/build"):
        store.image(f"{REPOSITORY}:z")


def test_layers_exported_by_buildah_are_moved_in_by_digest(
    store: ImageStore, tmp_path: Path
) -> None:
    export = tmp_path / "export"
    export.mkdir()
    digest = hashlib.sha256(b"layer").hexdigest()
    (export / digest).write_bytes(b"layer")
    (export / "version").write_text("Directory Transport Version: 1.1\n")
    store.take_in(export)
    assert store.has(f"sha256:{digest}")
    assert [path.name for path in export.iterdir()] == ["version"]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tree = tmp_path / "tree"
    (tree / "core" / "__pycache__").mkdir(parents=True)
    (tree / "core" / "brain.py").write_text("answer = 42\n")
    (tree / "core" / "__pycache__" / "brain.pyc").write_bytes(b"1")
    (tree / "pins.txt").write_text("torch==2\n")
    (tree / "other.py").write_text("")
    (tree / "Containerfile").write_text(
        "FROM x AS a\nCOPY pins.txt \\\n     core /opt/\nCOPY --from=a other.py /opt\n"
    )
    monkeypatch.setattr(layout, "TREE", tree)
    return tree


def test_the_key_of_an_image_follows_what_its_recipe_copies_and_nothing_else(tree: Path) -> None:
    recipe = tree / "Containerfile"
    before = inputs.key(recipe, "base:1")

    (tree / "other.py").write_text("changed")
    (tree / "core" / "__pycache__" / "brain.pyc").write_bytes(b"2")
    assert inputs.key(recipe, "base:1") == before

    keys = {before, inputs.key(recipe, "base:2")}
    (tree / "core" / "brain.py").write_text("answer = 43\n")
    keys.add(inputs.key(recipe, "base:1"))
    (tree / "core" / "brain.py").rename(tree / "core" / "mind.py")
    keys.add(inputs.key(recipe, "base:1"))
    (tree / "pins.txt").write_text("torch==3\n")
    keys.add(inputs.key(recipe, "base:1"))
    recipe.write_text(recipe.read_text() + "USER 1\n")
    keys.add(inputs.key(recipe, "base:1"))
    assert len(keys) == 6


def test_the_lasting_stages_have_a_key_of_their_own(tree: Path) -> None:
    recipe = tree / "Containerfile"
    recipe.write_text("FROM x\nCOPY pins.txt /\nFROM ${BASE} AS app\nCOPY core /opt/\n")
    before = inputs.lasting_key(recipe, "base:1")

    (tree / "core" / "brain.py").write_text("answer = 43\n")
    assert inputs.lasting_key(recipe, "base:1") == before
    (tree / "pins.txt").write_text("torch==3\n")
    assert inputs.lasting_key(recipe, "base:1") != before

    recipe.write_text("FROM x\n")
    with pytest.raises(ClusterError, match="has no line"):
        inputs.lasting_key(recipe, "base:1")


def test_a_recipe_that_copies_what_is_not_there_is_refused(tree: Path) -> None:
    (tree / "pins.txt").unlink()
    with pytest.raises(ClusterError, match=r"pins\.txt: a Containerfile copies it"):
        inputs.key(tree / "Containerfile", "base:1")


def test_builds_are_remembered_across_runs_and_forgotten_with_their_image(tmp_path: Path) -> None:
    path = tmp_path / "built.json"
    inputs.Memory(path).remember({"k1": "image:1"}, [])
    inputs.Memory(path).remember({"k2": "image:2"}, ["image:1"])
    assert inputs.Memory(path).recall("k1") == "image:1"
    inputs.Memory(path).remember({"k3": "image:3"}, ["image:2"])
    assert inputs.Memory(path).recall("k1") is None
    assert inputs.Memory(path).recall("k2") == "image:2"


def test_a_full_disk_is_said_before_anything_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCALER_CACHE_DIR", str(tmp_path))
    with pytest.raises(ClusterError, match=r"needs .* GiB free and there are .*KVSCALER_CACHE_DIR"):
        layout.require_free_disk(1 << 60, "a build")


def test_the_recorded_images_are_read_back_and_their_absence_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "ENVIRONMENT_FILE", tmp_path / "build" / "images.env")
    with pytest.raises(ClusterError, match="run hack/images/build"):
        layout.read_environment()
    layout.write_environment({"operator": "o:1", "sidecar": "s:2"})
    assert (tmp_path / "build" / "images.env").read_text() == (
        "OPERATOR_IMAGE=o:1\nSIDECAR_IMAGE=s:2\n"
    )
    assert layout.read_environment() == {"operator": "o:1", "sidecar": "s:2"}


@pytest.mark.parametrize(
    ("image", "rooms", "others"),
    [
        ("operator", {"core", "crds", "operator"}, {"sidecar", "kernels"}),
        ("sidecar", {"core", "kernels", "sidecar"}, {"operator", "crds"}),
    ],
)
def test_each_image_holds_its_rooms_only_so_that_others_change_without_it(
    image: str, rooms: set[str], others: set[str]
) -> None:
    recipe = (build.RECIPES / f"{image}.Containerfile").read_text()
    copied = {path.relative_to(layout.TREE).parts[0] for path in inputs.copied_files(recipe)}
    assert rooms | {"requirements"} == copied
    assert not copied & others


def test_another_recipe_of_a_base_is_another_image() -> None:
    python, toolchain = base.BASES["operator"], base.BASES["sidecar"]
    assert python.reference != toolchain.reference
    assert base.Base(python.name, (*python.packages, "gcc")).reference != python.reference


def test_large_blobs_are_shared_with_containerd_and_small_ones_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCALER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(containerd, "SHARED_BLOB_BYTES", 1000)
    store = layout.store()
    store.folder.mkdir(parents=True)
    large, small = b"x" * 1000, b"y" * 999
    image = store.image(add_image(store, "a", large, small))
    blobs = tmp_path / "root" / "io.containerd.content.v1.content" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for blob in image.blobs:
        (blobs / blob.hex).write_bytes(store.blob_path(blob.digest).read_bytes())

    assert containerd.share_large_blobs(tmp_path / "root", image) == 1
    for blob in image.blobs:
        ours, theirs = store.blob_path(blob.digest), blobs / blob.hex
        assert theirs.read_bytes() == ours.read_bytes()
        assert theirs.samefile(ours) == (blob.size_bytes >= 1000)
    assert containerd.share_large_blobs(tmp_path / "root", image) == 0


def test_a_store_that_is_being_read_is_not_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCALER_CACHE_DIR", str(tmp_path))
    with layout.reading_store(), layout.reading_store(), layout.cleaning_store() as possible:
        assert not possible
    with layout.cleaning_store() as possible:
        assert possible
