"""What `kvscaler plan` costs as a process, against `python -c "import pydantic"` by turns.

People run it in loops and scripts, so its start-up is most of what it costs.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import harness

FLOOR = "<= 4"
AIM = "<= 3"
PLAN = (
    *("-m", "kvscaler_cli.main", "plan", "llama-3.1-8b", "--accelerator", "h100"),
    *("--engine", "vllm", "--prompt-tokens", "1200", "--output-tokens", "300"),
)
COMMANDS = {
    "pydantic": ("-c", "import pydantic"),
    "table": PLAN,
    "does_not_fit": (*PLAN, "--concurrency", "5000"),
    "json": (*PLAN, "-o", "json"),
    "yaml": (*PLAN, "-o", "yaml"),
}


def process_seconds(*command: str) -> Callable[[], float]:
    """A round: the CPU seconds, user and system, of one Python process running `command`."""
    rooms = os.pathsep.join(str(harness.ROOT / room) for room in harness.ROOMS)

    def measure() -> float:
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": rooms},
            check=False,
            timeout=120,
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode()[-2000:]}")
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime

    return measure


def main() -> int:
    """Measure by turns and print the report."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    begun = time.perf_counter()
    subjects = {name: process_seconds(*command) for name, command in COMMANDS.items()}
    for measure in subjects.values():  # byte-compiles what is imported
        measure()
    samples = harness.alternate(subjects, args.rounds)
    harness.progress(f"measured for {time.perf_counter() - begun:.0f} s")
    figures = [
        harness.Figure(
            f"{name}_to_import_pydantic",
            harness.ratio(samples[name], samples["pydantic"]).median,
            floor=FLOOR,
            aim=AIM,
        )
        for name in COMMANDS
        if name != "pydantic"
    ]
    detail = {f"{name}_cpu_seconds": sample.to_json() for name, sample in samples.items()}
    return harness.report(
        "plan_process", figures, detail, check=args.check, packages=("pydantic", "click")
    )


if __name__ == "__main__":
    raise SystemExit(main())
