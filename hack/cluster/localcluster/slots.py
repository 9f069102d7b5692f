"""Which clusters this machine runs: a slot per cluster, found by its owner (a kubeconfig path).

The owner's record lies in the slot's state folder, which exists exactly while the slot is taken.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localcluster import build, sandbox
from localcluster.layout import SLOT_STATE_ROOT, SLOTS, Layout, with_node
from localcluster.steps import ClusterError, cache_dir, say

RECORD = "cluster.json"


@contextmanager
def machine_lock() -> Iterator[None]:
    """One `up` or `down` at a time: a second one waits, then finds the work done."""
    SLOT_STATE_ROOT.mkdir(parents=True, exist_ok=True)
    with (SLOT_STATE_ROOT / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("  waiting for another up or down on this machine")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def taken() -> list[Layout]:
    """The clusters that have a slot, running or left behind."""
    found = []
    for record in sorted(SLOT_STATE_ROOT.glob(f"*/{RECORD}")):
        owner = json.loads(record.read_text())
        kubeconfig = Path(owner["kubeconfig"])
        found.append(with_node(owner["name"], int(record.parent.name), kubeconfig))
    return found


def find(kubeconfig: Path) -> Layout | None:
    """The slot whose cluster publishes this kubeconfig."""
    return next((layout for layout in taken() if layout.kubeconfig == kubeconfig), None)


def take(name: str, kubeconfig: Path) -> Layout:
    """Give the cluster the lowest free slot whose address ranges this machine does not use."""
    used = {layout.slot for layout in taken()}
    free = [slot for slot in range(SLOTS) if slot not in used]
    # The slot that this cluster had last, if it can have it again: its images are there.
    free.sort(key=lambda slot: (_last_owner(slot) != str(kubeconfig), slot))
    reasons = []
    for slot in free:
        layout = with_node(name, slot, kubeconfig)
        sandbox.destroy(layout)  # a slot without a record may still hold a crashed cluster's rest
        if (clash := sandbox.range_in_use(layout)) is not None:
            reasons.append(clash)
            continue
        shutil.rmtree(layout.state, ignore_errors=True)
        layout.state.mkdir(parents=True)
        owner = {"name": name, "kubeconfig": str(kubeconfig), "versions": versions()}
        (layout.state / RECORD).write_text(json.dumps(owner))
        _owner_file(slot).parent.mkdir(parents=True, exist_ok=True)
        _owner_file(slot).write_text(str(kubeconfig))
        return layout
    detail = "; ".join(reasons) or "stop one with hack/cluster/down"
    raise ClusterError(f"no free slot for a cluster among {SLOTS}: {detail}")


def _owner_file(slot: int) -> Path:
    return cache_dir() / "image-store" / f"{slot}.owner"


def _last_owner(slot: int) -> str | None:
    return _owner_file(slot).read_text() if _owner_file(slot).exists() else None


def is_current(layout: Layout) -> bool:
    """Whether the cluster was started from the versions that are pinned now."""
    recorded: bool = json.loads((layout.state / RECORD).read_text())["versions"] == versions()
    return recorded


def release(layout: Layout) -> None:
    shutil.rmtree(layout.state, ignore_errors=True)


def versions() -> dict[str, str]:
    return {name: build.version(build.BINARIES[name]) for name in build.NODE_BINARIES}
