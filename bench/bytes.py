"""Predicted against real bytes: `kvscaler plan` in its own process, then the engine.

For each model and pool size: the prediction is made before the engine starts; one process loads
the model and allocates and touches the pool, and its resident set is read before and after; then
the real server is started with the same memory, serves requests that use its largest steps, and
its resident set is compared with the sum of the budget.
"""

import argparse
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import harness
from kvscaler.budget.settings import AUTO, CPU_COMPUTE_DTYPES
from kvscaler_sidecar.weights import builtin

MIB = 1 << 20
POOLS_MIB = (128, 256, 512)
MAX_CONTEXT_TOKENS = 2048
START_SECONDS = 180.0
PORTS = ("http", "metrics", "admin")


def environment() -> dict[str, str]:
    """This process's variables, with the rooms of this clone to import from."""
    rooms = os.pathsep.join(str(harness.ROOT / room) for room in harness.ROOMS)
    return os.environ | {"PYTHONPATH": rooms}


def run(*command: str) -> dict[str, Any]:
    """The JSON that a Python module or script prints."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment()
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def plan(folder: Path, memory_bytes: int, dtype: str) -> dict[str, Any]:
    """What `kvscaler plan` predicts for the whole of `memory_bytes`."""
    return run(
        *("-m", "kvscaler_cli.main", "plan", str(folder), "--accelerator", "cpu", "-o", "json"),
        *("--memory", str(memory_bytes), "--memory-utilization", "1", "--weight-dtype", dtype),
        *("--max-model-len", str(MAX_CONTEXT_TOKENS)),
    )


def resident_bytes(pid: int | str = "self") -> int:
    """Resident set of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def pool_child(folder: Path, predicted: dict[str, Any]) -> None:
    """In a process of its own: load, then measure what the pool alone adds."""
    from kvscaler_sidecar.executors.dtype import choose_compute_dtype
    from kvscaler_sidecar.executors.torch_cpu import Torch, TorchSettings

    executor = Torch.load(
        folder,
        TorchSettings(
            block_tokens=predicted["blockTokens"],
            step_tokens=predicted["stepTokens"],
            max_sequences=predicted["maxSequences"],
            max_context_tokens=predicted["maxContextTokens"],
            compute=choose_compute_dtype(predicted["computeDtype"]),
        ),
    )
    before = resident_bytes()
    executor.allocate(predicted["blocks"])
    print(
        json.dumps(
            {
                "pool_growth_bytes": resident_bytes() - before,
                "pool_bytes": executor.pool_bytes,
                "weight_bytes": executor.weight_bytes,
                "workspace_bytes": executor.workspace_bytes,
            }
        )
    )


def serve(folder: Path, dtype: str, memory_bytes: int) -> dict[str, Any]:
    """Start the server, make it work, and read its own report and its resident set."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    command = [
        *(sys.executable, "-m", "kvscaler_sidecar.main", "serve", "--host", "127.0.0.1"),
        *("--model-uri", str(folder), "--served-names", "m"),
        *("--memory-bytes", str(memory_bytes), "--memory-utilization-percent", "100"),
        *(
            "--max-context-tokens",
            str(MAX_CONTEXT_TOKENS),
            "--log-level",
            "warning",
            "--compute-dtype",
            dtype,
        ),
        *(word for name in PORTS for word in (f"--{name}-port", str(ports[name]))),
    ]
    process = subprocess.Popen(command, env=environment(), stdout=sys.stderr)
    try:
        state_url = f"http://127.0.0.1:{ports['metrics']}/state"
        wait_ready(process, f"http://127.0.0.1:{ports['metrics']}/health/ready")
        idle = resident_bytes(process.pid)
        make_work(f"http://127.0.0.1:{ports['http']}/v1/completions")
        with urllib.request.urlopen(state_url, timeout=30) as answer:
            state: dict[str, Any] = json.load(answer)
        return {"state": state, "idle_bytes": idle, "resident_bytes": resident_bytes(process.pid)}
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    import socket

    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Until the server is ready; its end or silence is an error."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} while starting")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {START_SECONDS:.0f} s")


def make_work(url: str) -> None:
    """A prompt of nearly the whole context, and a batch of sampled requests with logprobs."""
    sizes = [(MAX_CONTEXT_TOKENS - 100, 8), *[(40, 24)] * 12]
    with concurrent.futures.ThreadPoolExecutor(len(sizes)) as pool:
        jobs = [pool.submit(complete, url, prompt, output) for prompt, output in sizes]
        for job in jobs:
            job.result()


def complete(url: str, prompt_tokens: int, output_tokens: int) -> None:
    """One completion, answered in full."""
    body = {
        "model": "m",
        "prompt": [500 + n % 97 for n in range(prompt_tokens)],
        "max_tokens": output_tokens,
        "temperature": 1.0,
        "top_p": 0.99,
        "logprobs": 5,
    }
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} answered {error.code}: {error.read()[:500]!r}") from error


def make_tiny(folder: Path) -> Path:
    """A random GQA model with other head dims, and SmolLM2's vocabulary and tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = builtin.ensure("builtin://smollm2-135m")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=40,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def measure(name: str, folder: Path, pool_mib: int, dtype: str) -> list[harness.Figure]:
    """All figures of one model with one pool size."""
    base = plan(folder, 1 << 40, dtype)["overheadBytes"]
    predicted = plan(folder, base + pool_mib * MIB, dtype)
    harness.progress(f"{name}, {pool_mib} MiB: {predicted['blocks']} blocks predicted")
    pool = run(str(Path(__file__)), "--child", str(folder), json.dumps(predicted))
    server = serve(folder, dtype, predicted["deviceBytes"])
    capacity = server["state"]["capacity"]
    label = f"{name}_{pool_mib}_mib"
    counted = pool["pool_bytes"] == capacity["pool_bytes"] == predicted["poolBytes"]
    blocks = capacity["kv_blocks"] == predicted["blocks"]
    weights = capacity["weight_bytes"] == line(predicted, "weights")
    return [
        harness.Figure(
            f"counted_equals_predicted_{label}",
            float(counted and blocks and weights),
            floor="== 1",
            peer={"blocks": predicted["blocks"], "pool_bytes": predicted["poolBytes"]},
        ),
        harness.Figure(
            f"pool_growth_deviation_{label}",
            abs(pool["pool_growth_bytes"] / predicted["poolBytes"] - 1),
            floor="<= 0.02",
            peer={"growth_bytes": pool["pool_growth_bytes"]},
        ),
        harness.Figure(
            f"process_deviation_{label}",
            abs(server["resident_bytes"] / predicted["totalBytes"] - 1),
            floor="<= 0.05",
            peer={
                "resident_bytes": server["resident_bytes"],
                "resident_bytes_before_work": server["idle_bytes"],
                "predicted_bytes": predicted["totalBytes"],
                "runtime_bytes_that_would_fit": server["resident_bytes"]
                - predicted["totalBytes"]
                + line(predicted, "runtime"),
            },
        ),
    ]


def line(predicted: dict[str, Any], name: str) -> int:
    """Bytes of one line of the plan."""
    found: int = next(each["bytes"] for each in predicted["lines"] if each["name"] == name)
    return found


def main() -> int:
    """Measure and report."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "PLAN"), help=argparse.SUPPRESS)
    parser.add_argument("--pools-mib", type=int, nargs="*", default=list(POOLS_MIB))
    parser.add_argument("--dtype", default=AUTO, choices=CPU_COMPUTE_DTYPES)
    options = parser.parse_args()
    if options.child:
        pool_child(Path(options.child[0]), json.loads(options.child[1]))
        return 0
    from kvscaler_sidecar.executors.dtype import choose_compute_dtype

    dtype = choose_compute_dtype(options.dtype).name
    figures: list[harness.Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        models = {
            "smollm2": builtin.ensure("builtin://smollm2-135m"),
            "tiny": make_tiny(Path(scratch)),
        }
        for name, folder in models.items():
            for pool_mib in options.pools_mib:
                figures += measure(name, folder, pool_mib, dtype)
    return harness.report(
        "bytes", figures, {"compute_dtype": dtype}, check=options.check, packages=("torch",)
    )


if __name__ == "__main__":
    sys.exit(main())
