"""The real images: built by buildah, imported into the cluster's node, and run there in Pods."""

import json
import shutil
import tarfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from localcluster import images as node_images
from localcluster.handle import ClusterHandle
from localcluster.steps import ClusterError, wait_until
from localimages import build, containerd, layout
from localimages.store import StoredImage

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

OPERATOR_LIMIT_BYTES = 300_000_000
ENFORCE = "pod-security.kubernetes.io/enforce"
# What the rebuild of one changed file may send: manifest, configuration, application layer.
REBUILD_LIMIT_BYTES = 5_000_000


@pytest.fixture(scope="session")
def images() -> dict[str, StoredImage]:
    return {name: layout.store().image(ref) for name, ref in build.build_all().items()}


class Node:
    """The cluster's node: its image store, and Pods that run a program in an image."""

    def __init__(self, cluster: ClusterHandle) -> None:
        if cluster.layout is None:
            pytest.skip("these tests import images, which needs a local cluster")
        self._cluster, self._layout = cluster, cluster.layout

    @property
    def socket(self) -> Path:
        return self._layout.containerd_socket

    def import_images(self, references: Iterable[str]) -> None:
        containerd.import_images(self.socket, list(references), self._layout.image_store)

    def ctr(self, *arguments: str) -> set[str]:
        return set(node_images.ctr(self._layout, *arguments).split())

    def images(self) -> set[str]:
        return self.ctr("images", "ls", "--quiet")

    def contents(self) -> set[str]:
        return self.ctr("content", "ls", "--quiet")

    def run_python(self, image: StoredImage, program: str) -> Any:
        """What the program printed as JSON in a Pod that Pod Security's `restricted` admits."""
        with self._cluster.namespace() as namespace:
            self._cluster.kubectl("label", "namespace", namespace, f"{ENFORCE}=restricted")
            self._cluster.apply(restricted_pod(namespace, image.reference, program))
            pod = ("--namespace", namespace, "pod", "probe")

            def phase() -> str:
                found = self._cluster.get(*pod)
                return str(found["status"].get("phase"))

            wait_until(lambda: phase() in ("Succeeded", "Failed"), "the Pod has run", 180)
            log = self._cluster.kubectl("logs", "--namespace", namespace, "probe")
            assert phase() == "Succeeded", log
            return json.loads(log.strip().splitlines()[-1])


def restricted_pod(namespace: str, image: str, program: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "probe",
                    "image": image,
                    "imagePullPolicy": "Never",
                    "command": ["python3", "-c", program],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                    },
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }


@pytest.fixture(scope="session")
def node(cluster: ClusterHandle, images: dict[str, StoredImage]) -> Node:
    """The cluster's node, with both images."""
    node = Node(cluster)
    node.import_images(image.reference for image in images.values())
    return node


@pytest.fixture
def changed_tree(tmp_path: Path) -> Iterator[Path]:
    """A copy of this tree that builds use instead, to be changed at will."""
    for part in ("core", "crds", "operator", "sidecar", "kernels", "requirements"):
        shutil.copytree(
            layout.TREE / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__")
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "TREE", tmp_path)
        patch.setattr(layout, "ENVIRONMENT_FILE", tmp_path / "build" / "images.env")
        yield tmp_path
    build.build_all()  # this tree's images may have been cleaned away meanwhile


def files_of(image: StoredImage) -> list[tarfile.TarInfo]:
    """What the image's file system holds: upper layers hide and remove what lower ones have."""
    files: dict[str, tarfile.TarInfo] = {}
    for layer in image.blobs[2:]:
        with tarfile.open(layout.store().blob_path(layer.digest)) as archive:
            for file in archive:
                folder, _, name = file.name.rpartition("/")
                if name.startswith(".wh."):
                    files.pop(f"{folder}/{name.removeprefix('.wh.')}")
                else:
                    files[file.name] = file
    return list(files.values())


def settings_of(image: StoredImage) -> dict[str, object]:
    config = json.loads(layout.store().blob_path(image.blobs[1].digest).read_text())
    settings: dict[str, object] = config["config"]
    return settings


def test_the_operator_image_is_small_and_has_neither_torch_nor_numpy(
    images: dict[str, StoredImage],
) -> None:
    files = files_of(images["operator"])
    assert sum(file.size for file in files) <= OPERATOR_LIMIT_BYTES
    top_level = {
        Path(file.name).parts[3]
        for file in files
        if file.name.startswith("opt/kvscaler/packages/") and len(Path(file.name).parts) > 3
    }
    assert {"kopf", "kubernetes"} < top_level
    assert not top_level & {"torch", "numpy", "triton", "nvidia", "pandas", "uv"}


@pytest.mark.parametrize("image", ["operator", "sidecar"])
def test_an_image_runs_its_command_as_an_ordinary_user(
    images: dict[str, StoredImage], image: str
) -> None:
    settings = settings_of(images[image])
    assert settings["User"] == "65532:65532"
    assert settings["Entrypoint"] == [f"kvscaler-{image}"]


@pytest.mark.parametrize("image", ["operator", "sidecar"])
def test_nothing_in_an_image_gives_a_user_more_rights_or_may_be_changed_by_all(
    images: dict[str, StoredImage], image: str
) -> None:
    risky = [
        file.name
        for file in files_of(images[image])
        if file.isfile() and (file.mode & 0o6000 or file.mode & 0o002)
    ]
    assert risky == []


def test_the_operator_starts_with_a_read_only_root(
    node: Node, images: dict[str, StoredImage]
) -> None:
    answer = node.run_python(
        images["operator"],
        "import json, os, subprocess, kopf, kubernetes.aio, prometheus_api_client\n"
        "try: open('/opt/x', 'w'); written = True\n"
        "except OSError: written = False\n"
        "help = subprocess.run(['kvscaler-operator', '--help'], capture_output=True, text=True)\n"
        "open('/tmp/x', 'w')\n"
        "print(json.dumps([os.getuid(), written, help.returncode, help.stdout + help.stderr]))",
    )
    assert answer[:3] == [65532, False, 0], answer
    assert "usage: kvscaler-operator" in str(answer[3])


def test_the_sidecar_finds_torch_its_model_and_a_compiler_with_a_read_only_root(
    node: Node, images: dict[str, StoredImage]
) -> None:
    answer = node.run_python(
        images["sidecar"],
        "import json, os, subprocess, sysconfig, torch, triton\n"
        "from kvscaler_sidecar.weights import builtin\n"
        "from safetensors.torch import load_file\n"
        "folder = builtin.find('builtin://smollm2-135m')\n"
        "weights = load_file(folder / 'model.safetensors')\n"
        "from triton.runtime.build import _build\n"
        "os.makedirs('/tmp/c'); source = '/tmp/c/a.c'\n"
        "open(source, 'w').write('#include <Python.h>\\nint answer(void) {return 42;}')\n"
        "library = _build('a', source, '/tmp/c', [], [], [], [])\n"
        "help = subprocess.run(['kvscaler-sidecar', '--help'], capture_output=True, text=True)\n"
        "import ctypes\n"
        "print(json.dumps({'uid': os.getuid(), 'folder': str(folder), 'tensors': len(weights),\n"
        "  'cuda': torch.version.cuda, 'sum': float((torch.ones(3) @ torch.ones(3))),\n"
        "  'compiled': ctypes.CDLL(library).answer(), 'help': help.returncode,\n"
        "  'words': help.stdout + help.stderr}))",
    )
    words = answer.pop("words")
    assert str(answer.pop("cuda")).startswith("13.")
    assert answer == {
        "uid": 65532,
        "folder": "/models/smollm2-135m",
        "tensors": 272,
        "sum": 3.0,
        "compiled": 42,
        "help": 0,
    }, words


def test_the_model_in_the_image_is_the_one_of_this_converter(
    images: dict[str, StoredImage],
) -> None:
    models = {
        file.name for file in files_of(images["sidecar"]) if "models/smollm2-135m/" in file.name
    }
    assert {Path(name).name for name in models} == {
        "config.json",
        "generation_config.json",
        "kvscaler-model.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_building_and_importing_again_changes_nothing(
    node: Node, images: dict[str, StoredImage]
) -> None:
    before = node.contents()
    again = build.build_all()
    assert again == {name: image.reference for name, image in images.items()}
    node.import_images(again.values())
    assert node.contents() == before


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("operator/kvscaler_operator/__init__.py", {"operator"}),
        ("sidecar/kvscaler_sidecar/__init__.py", {"sidecar"}),
        ("core/kvscaler/__init__.py", {"operator", "sidecar"}),
    ],
)
def test_a_code_change_makes_new_tags_whose_application_layer_alone_travels(
    node: Node,
    images: dict[str, StoredImage],
    changed_tree: Path,
    file: str,
    changes: set[str],
) -> None:
    source = changed_tree / file
    source.write_text(source.read_text() + f"\n# {uuid.uuid4()}\n")

    references = build.build_all()
    changed = {name for name in references if references[name] != images[name].reference}
    assert changed == changes
    for name in changed:
        image = layout.store().image(references[name])
        assert image.lasting_layers == images[name].lasting_layers
        travels = [blob for blob in image.blobs if blob not in images[name].blobs]
        assert len(travels) == 3
        assert sum(blob.size_bytes for blob in travels) < REBUILD_LIMIT_BYTES

    node.import_images(references.values())
    assert set(references.values()) <= node.images()


def test_equal_content_gets_an_equal_tag(
    images: dict[str, StoredImage], changed_tree: Path
) -> None:
    # Forget what was built, so that buildah really makes the image anew from another folder.
    (layout.folder() / "built.json").unlink()
    assert build.build_all()["operator"] == images["operator"].reference


@pytest.fixture
def images_restored(node: Node, images: dict[str, StoredImage]) -> Iterator[None]:
    """Gives this tree's images back after a test that crowds them out: later tests run them."""
    yield
    assert build.build_all() == {name: image.reference for name, image in images.items()}
    node.import_images(image.reference for image in images.values())


@pytest.mark.usefixtures("images_restored")
def test_an_image_that_a_container_uses_stays_when_it_is_old(
    node: Node, images: dict[str, StoredImage], changed_tree: Path
) -> None:
    old = images["operator"].reference
    name = f"test-{uuid.uuid4().hex[:8]}"
    node.ctr("containers", "create", old, name)
    try:
        for _ in range(build.KEEP_TAGS):
            source = changed_tree / "operator/kvscaler_operator/__init__.py"
            source.write_text(source.read_text() + f"\n# {uuid.uuid4()}\n")
            references = build.build_all()
            node.import_images(references.values())
        assert old not in layout.store().references()
        assert old in node.images()
    finally:
        node.ctr("containers", "delete", name)
    node.import_images(references.values())
    assert old not in node.images()


def test_a_containerd_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no containerd listens there"):
        containerd.import_images(tmp_path / "none.sock", [f"{layout.image_repository('x')}:1"])
