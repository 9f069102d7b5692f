"""The base images, made by debootstrap from the distribution's packages, once per recipe.

No registry is needed. What only installs, boots or administers a machine is taken out again; the
package database keeps saying what is left, for scanners. Debian's security fixes arrive with its
point releases: raise `EDITION` to make the bases anew.
"""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from localcluster.steps import step

from localimages import buildah, layout, tools

EDITION = 1
SUITE = "bookworm"
USER_ID = 65532
_GIB = 1 << 30


@dataclass(frozen=True)
class Base:
    """One base image: its name and the packages beside the minimal system."""

    name: str
    packages: tuple[str, ...]

    @property
    def reference(self) -> str:
        """Name with a tag that changes with the recipe."""
        recipe = [EDITION, SUITE, asdict(self), _SURPLUS_PACKAGES, _SURPLUS_FILES]
        key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
        return f"{layout.image_repository('base')}:{self.name}-{key}"


_PYTHON = ("ca-certificates", "python3", "tzdata")
BASES = {
    "operator": Base("python", _PYTHON),
    # Triton compiles a C launcher for each kernel signature on a GPU node.
    "sidecar": Base("toolchain", (*_PYTHON, "gcc", "libc6-dev", "libpython3.11-dev")),
}

_SURPLUS_PACKAGES = (
    *("apt", "libapt-pkg6.0", "gpgv", "debian-archive-keyring", "debconf", "perl-base"),
    *("adduser", "login", "passwd", "mount", "util-linux", "bsdutils"),
    *("e2fsprogs", "logsave", "sysvinit-utils", "hostname", "diffutils"),
    *("python3-lib2to3", "python3-distutils"),
)
_SURPLUS_FILES = (
    *("dev/*", "proc/*", "sys/*", "run/*", "tmp/*", "root/.[a-z]*", "debootstrap"),
    *("etc/resolv.conf", "etc/hostname", "etc/machine-id", "etc/apt", "etc/pam.d"),
    *("usr/share/doc/*", "usr/share/man/*", "usr/share/info/*", "usr/share/locale/*"),
    *("usr/share/i18n", "usr/share/lintian", "usr/share/perl*", "usr/share/bash-completion"),
    *("usr/lib/x86_64-linux-gnu/libpython3.11.a", "usr/lib/python3.11/config-*"),
    *("usr/lib/python3.11/test", "usr/lib/python3.11/idlelib", "usr/lib/python3.11/ensurepip"),
    *("var/cache/*", "var/log/*", "var/lib/apt", "var/lib/dpkg/*-old", "usr/share/gcc"),
)


def ensure(base: Base) -> str:
    """Make the base image if this recipe's is not there; its reference."""
    if buildah.exists(base.reference):
        return base.reference
    layout.require_free_disk(3 * _GIB, f"the base image '{base.name}'")
    work = layout.folder() / "base" / base.name
    downloads = layout.folder() / "debs"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    downloads.mkdir(parents=True, exist_ok=True)
    tree = work / "root"
    with step(f"base '{base.name}': debootstrap {SUITE} with {', '.join(base.packages)}"):
        options = ["--variant=minbase", f"--include={','.join(base.packages)}"]
        tools.run(["debootstrap", *options, f"--cache-dir={downloads}", SUITE, str(tree)])
        _strip(tree)
    with step(f"base '{base.name}': image"):
        recipe = work / "Containerfile"
        recipe.write_text('FROM scratch\nCOPY root /\nENV LANG=C.UTF-8\nCMD ["python3"]\n')
        buildah.build(recipe, work, base.reference)
    shutil.rmtree(work)
    return base.reference


def _strip(tree: Path) -> None:
    installed = tools.run(["chroot", str(tree), "dpkg-query", "-Wf", "${Package}\n"]).split()
    surplus = [package for package in _SURPLUS_PACKAGES if package in installed]
    tools.run(["chroot", str(tree), "dpkg", "--purge", "--force-all", *surplus])
    for pattern in _SURPLUS_FILES:
        for path in tree.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    # Byte code with fixed validity: file times are set to a constant when the image is written.
    compile_all = (
        "python3 -m compileall -q -f --invalidation-mode unchecked-hash /usr/lib/python3.11"
    )
    tools.run(["chroot", str(tree), "sh", "-c", compile_all])
    for name, line in {
        "passwd": f"kvscaler:x:{USER_ID}:{USER_ID}::/tmp:/usr/sbin/nologin",
        "group": f"kvscaler:x:{USER_ID}:",
    }.items():
        with (tree / "etc" / name).open("a") as file:
            file.write(f"{line}\n")
