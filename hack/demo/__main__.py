"""`python -m hack.demo`: cluster, chart, object, traffic, view, report; see `make help`."""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hack.demo.profile import DEMO, PROFILES
from hack.demo.run import Demo, DemoError

TREE = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every check holds, 1 when one does not, 2 when it could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m hack.demo",
        description="A traffic spike scales a service by its KV budget, on a local cluster.",
    )
    parser.add_argument("profile", nargs="?", choices=sorted(PROFILES), default=DEMO.name,
                        help="which demo (default: demo)")  # fmt: skip
    parser.add_argument("--calm-seconds", type=float)
    parser.add_argument("--spike-seconds", type=float)
    parser.add_argument("--out", type=Path, help="folder of the report (default: build/PROFILE)")
    parser.add_argument("--signal-paths", default="direct,prometheus",
                        help="what the operator may read: direct, prometheus, or both")  # fmt: skip
    parser.add_argument("--stop-prometheus", action="store_true",
                        help="take Prometheus away before the spike")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="leave cluster and service running")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    profile = PROFILES[arguments.profile]
    out: Path = arguments.out or TREE / "build" / profile.name
    demo = Demo(TREE, out, arguments.calm_seconds or profile.calm_seconds,
                arguments.spike_seconds or profile.spike_seconds, arguments.signal_paths,
                arguments.stop_prometheus, arguments.keep, profile)  # fmt: skip
    try:
        report = asyncio.run(demo.run())
    except (DemoError, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    report["total_seconds"] = round(time.monotonic() - began, 1)
    (out / "report.json").write_text(json.dumps(report, indent=2))
    print()
    for check in report["checks"]:
        print(f"{'✓' if check['holds'] else '✗'} {check['name']}: {check['seen']}")
    print(f"\n{report['summary']}")
    print(f"Report: {out}/report.json, report.html, demo.png "
          f"({report['total_seconds']:.0f} s in all)")  # fmt: skip
    return 0 if all(check["holds"] for check in report["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
