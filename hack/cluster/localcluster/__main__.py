"""The commands of hack/cluster."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from localcluster import build, debian, fakes, images, lifecycle, packages, standalone
from localcluster.layout import DEFAULT_NAME, Layout, kubeconfig_path
from localcluster.steps import ClusterError, say

TREE = Path(__file__).resolve().parents[3]


def _up(arguments: argparse.Namespace) -> None:
    if arguments.only == "control-plane":
        if lifecycle.is_up(TREE, arguments.name):
            raise ClusterError(
                f"cluster {arguments.name!r} is up with its node: give another --name, or take it "
                "down first"
            )
        standalone.up(TREE, arguments.name)
    else:
        standalone.down(TREE, arguments.name)  # a control plane alone gives way to the whole
        lifecycle.up(TREE, arguments.name, audit=arguments.audit)


def _down(arguments: argparse.Namespace) -> None:
    if arguments.all:
        lifecycle.down_all()
    elif not standalone.down(TREE, arguments.name):
        lifecycle.down(TREE, arguments.name, arguments.wipe)


def _status(arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(lifecycle.describe(_running(arguments)))
    else:
        print(lifecycle.status())


def _build(arguments: argparse.Namespace) -> None:
    names = arguments.binary or build.NODE_BINARIES
    build.ensure(*names)
    for name in names:
        print(build.path(name))


def _binary(arguments: argparse.Namespace) -> None:
    if arguments.binary == debian.PROMETHEUS_2:
        print(debian.prometheus_2())
    else:
        build.ensure(arguments.binary)
        print(build.path(arguments.binary))


def _kubectl(arguments: argparse.Namespace) -> None:
    _exec("kubectl", arguments)


def _helm(arguments: argparse.Namespace) -> None:
    _exec("helm", arguments)


def _exec(name: str, arguments: argparse.Namespace) -> None:
    """Become the tool, with the cluster's kubeconfig and nothing of the user's."""
    cluster_name = os.environ.get("KVSCALER_CLUSTER", DEFAULT_NAME)
    kubeconfig = kubeconfig_path(TREE, cluster_name)
    if not kubeconfig.exists():
        raise ClusterError(f"cluster {cluster_name!r} is not up: run hack/cluster/up")
    build.ensure(name)
    helm_folder = kubeconfig.parent / "helm"
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    for kind in ("CACHE", "CONFIG", "DATA"):
        environment[f"HELM_{kind}_HOME"] = str(helm_folder / kind.lower())
    sys.stdout.flush()
    os.execve(build.path(name), [name, *arguments.rest], environment)


def _import_image(arguments: argparse.Namespace) -> None:
    layout = _running(arguments)
    for archive in arguments.archive:
        for reference in images.import_archive(layout, archive):
            print(reference)


def _fake_nodes(arguments: argparse.Namespace) -> None:
    alone = standalone.find(TREE, arguments.name)
    fakes.set_nodes(alone or _running(arguments), arguments.count)


def _running(arguments: argparse.Namespace) -> Layout:
    return lifecycle.find_running(TREE, arguments.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hack/cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, function: object, text: str, named: bool = True
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(function=function)
        if named:
            added.add_argument("--name", default=DEFAULT_NAME, help="which cluster")
        return added

    added = command("up", _up, "Bring a cluster up, or repair it.")
    added.add_argument("--only", choices=["control-plane"], help="no node: no root needed")
    added.add_argument("--audit", action="store_true", help="log every write to logs/audit.log")
    added = command("down", _down, "Stop a cluster and leave nothing of it.")
    added.add_argument("--wipe", action="store_true", help="remove its image store, too")
    added.add_argument("--all", action="store_true", help="every cluster of this machine")
    added = command("status", _status, "What runs on this machine.")
    added.add_argument(
        "--json", action="store_true", help="this cluster's addresses and images, for scripts"
    )
    added = command("build", _build, "Build binaries (without arguments: a node's).", named=False)
    added.add_argument("binary", nargs="*", help=f"of {', '.join(build.BINARIES)}")
    added = command("binary", _binary, "Print a binary's path; build it if missing.", named=False)
    added.add_argument("binary", help=f"{', '.join(build.BINARIES)} or {debian.PROMETHEUS_2}")
    added = command("import-image", _import_image, "Import image archives (tar files).")
    added.add_argument("archive", nargs="+", type=Path)
    added = command("fake-nodes", _fake_nodes, "Have COUNT nodes that only pretend (kwok).")
    added.add_argument("count", type=int)
    for name, function in (("kubectl", _kubectl), ("helm", _helm)):
        added = command(name, function, f"{name} on the cluster $KVSCALER_CLUSTER.", named=False)
        added.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def main(argv: Sequence[str]) -> int:
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{packages.SYSTEM_FOLDERS}"
    if argv and argv[0] in ("kubectl", "helm"):  # all further words are theirs, flags included
        arguments = argparse.Namespace(
            function=_kubectl if argv[0] == "kubectl" else _helm, rest=argv[1:]
        )
    else:
        arguments = _parser().parse_args(argv)
    try:
        arguments.function(arguments)
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; hack/cluster/down removes what was begun")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
