"""The commands of hack/images."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from localcluster import lifecycle
from localcluster.layout import DEFAULT_NAME, kubeconfig_path
from localcluster.steps import ClusterError, say

from localimages import build, containerd, layout


def _build(arguments: argparse.Namespace) -> None:
    for reference in build.build_all().values():
        print(reference)
    if arguments.import_too:
        if kubeconfig_path(layout.TREE, arguments.cluster).exists():
            _import(arguments)
        else:
            say(f"  cluster {arguments.cluster!r} is not up: nothing imported")


def _import(arguments: argparse.Namespace) -> None:
    references = list(layout.read_environment().values())
    if arguments.address is not None:
        containerd.import_images(arguments.address, references)
        return
    cluster = lifecycle.find_running(layout.TREE, arguments.cluster)
    containerd.import_images(cluster.containerd_socket, references, cluster.image_store)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hack/images", description=__doc__)
    commands = parser.add_subparsers(required=True)
    text = "Build both images; their names go to standard output and build/images.env."
    added = commands.add_parser("build", help=text, description=text)
    added.set_defaults(function=_build)
    added.add_argument("--import", dest="import_too", action="store_true", help="then import them")
    added.add_argument("--cluster", default=DEFAULT_NAME, help="the cluster to import into")
    added.set_defaults(address=None)
    text = "Import the images of the last build; only layers that the cluster lacks travel."
    added = commands.add_parser("import", help=text, description=text)
    added.set_defaults(function=_import)
    added.add_argument("--cluster", default=DEFAULT_NAME, help="which local cluster")
    added.add_argument("--address", type=Path, help="another containerd, by its socket")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        arguments.function(arguments)
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        return 130
    say(f"  {time.monotonic() - started:5.1f} s  in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
