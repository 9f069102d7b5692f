"""Building both images: base, dependencies, model, application, each only when it changed.

The lasting stages of the Containerfiles are named when built, which keeps them from being cleaned
away; the application on top is made anew in seconds.
"""

from dataclasses import dataclass

from localcluster.steps import say, step

from localimages import base, buildah, inputs, layout, tools
from localimages.buildah import BuiltImage
from localimages.store import ImageStore

RECIPES = layout.TREE / "hack" / "images"
KEEP_TAGS = 3
# Dependencies of the sidecar: in uv's cache, in buildah's storage, its temporary copy, the export.
SIDECAR_FIRST_BUILD_BYTES = 22 << 30
REBUILD_BYTES = 2 << 30


@dataclass(frozen=True)
class Stage:
    """A lasting stage of a Containerfile, with words for what making it anew means."""

    target: str
    words: str


STAGES = {
    "operator": (Stage("stable", "dependencies (operator.txt)"),),
    "sidecar": (
        Stage("packages", "dependencies with torch (minutes and 5 GB when sidecar.txt changed)"),
        Stage("converter", "model conversion"),
        Stage("stable", "model layer"),
    ),
}


def stage_reference(image: str, target: str) -> str:
    return f"{layout.image_repository(image)}-stage:{target}"


def build_all() -> dict[str, str]:
    """Build both images from this tree, put them into the store and record them; references."""
    tools.ensure()
    with layout.building():
        first = not buildah.exists(stage_reference("sidecar", "packages"))
        layout.require_free_disk(
            SIDECAR_FIRST_BUILD_BYTES if first else REBUILD_BYTES,
            "the first build of the sidecar image" if first else "a build",
        )
        references = {image: ensure_image(image) for image in layout.IMAGES}
        layout.write_environment(references)
    return references


def ensure_image(image: str) -> str:
    """Build one image unless these very inputs were built before; its reference."""
    recipe = RECIPES / f"{image}.Containerfile"
    memory = inputs.Memory(layout.folder() / "built.json")
    base_reference = base.BASES[image].reference
    input_key = inputs.key(recipe, base_reference)
    known = memory.recall(input_key)
    if known is not None and known in layout.store().references():
        layout.store().renew(known)
        say(f"    0.0 s  {image}: unchanged, {known}")
        return known
    lasting_key = inputs.lasting_key(recipe, base_reference)
    reference = _build(image, lasting_stages_too=memory.recall(lasting_key) is None)
    kept = _collect()
    memory.remember({input_key: reference, lasting_key: reference}, kept)
    return reference


def _build(image: str, *, lasting_stages_too: bool) -> str:
    """Build and store an image.

    Its last stage builds the others, too, as far as they changed; naming the lasting ones is for
    the words, and so that cleaning up leaves their steps to be reused.
    """
    base_reference = base.ensure(base.BASES[image])
    recipe = RECIPES / f"{image}.Containerfile"
    for stage in STAGES[image] if lasting_stages_too else ():
        with step(f"{image}: {stage.words}"):
            buildah.build(
                recipe,
                layout.TREE,
                stage_reference(image, stage.target),
                base=base_reference,
                target=stage.target,
            )
    with step(f"{image}: application"):
        working = f"{layout.image_repository(image)}:latest"
        built = buildah.build(recipe, layout.TREE, working, base=base_reference)
        reference = f"{layout.image_repository(image)}:{built.image_id[:12]}"
        buildah.tag(working, reference)
    _store(image, reference, built)
    say(f"           {reference}, {built.unpacked_bytes / 1e6:.0f} MB unpacked")
    return reference


def _store(image: str, reference: str, built: BuiltImage) -> None:
    store = layout.store()
    if not all(store.has(layer.digest) for layer in built.layers[:-1]):
        with step(f"{image}: export of lasting layers ({built.unpacked_bytes / 1e6:.0f} MB, once)"):
            incoming = layout.folder() / "incoming"
            buildah.export_plain(reference, incoming)
            store.take_in(incoming)
    with step(f"{image}: export"):
        buildah.export(reference)
        store.renew(reference)  # the same content may have been built long ago


def _collect() -> list[str]:
    """Keep the last tags of each image, the stages and bases of now; remove all else."""
    with step("remove what is not needed any more"):
        store = layout.store()
        kept: list[str] = []
        lasting: set[str] = set()
        for image in layout.IMAGES:
            kept += recent_tags(store, f"{layout.image_repository(image)}:")
            stages = {stage_reference(image, stage.target) for stage in STAGES[image]}
            lasting |= {*stages, f"{layout.image_repository(image)}:latest"}
        bases = {recipe.reference for recipe in base.BASES.values()}
        buildah.keep({*kept, *lasting, *bases})
        with layout.cleaning_store() as possible:
            if possible:
                store.keep(kept)
    return kept


def recent_tags(store: ImageStore, prefix: str) -> list[str]:
    """The newest tag and the few before it, as long as only their application differs.

    An older tag on another dependency layer would hold on to five gigabytes.
    """
    tags = [name for name in store.references() if name.startswith(prefix)][-KEEP_TAGS:]
    if not tags:
        return []
    newest = store.image(tags[-1]).lasting_layers
    return [tag for tag in tags if store.image(tag).lasting_layers == newest]
