"""`helm test`: is the operator ready behind its Service, and does the API server serve our kind?

A Service leads only to Pods that are ready, and the operator is ready after its first full pass.
"""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc/apis/kvscaler.io/v1alpha1"
DEADLINE_SECONDS = 60.0
NEEDED = {"inferenceservices", "inferenceservices/status", "inferenceservices/scale"}


def fetch(url: str) -> str:
    """The body at `url`, asked as this Pod's account where the API server is asked."""
    request = urllib.request.Request(url)  # noqa: S310 - both addresses are the chart's own
    context = None
    if url.startswith("https://"):
        token = (ACCOUNT / "token").read_text()
        request.add_header("Authorization", f"Bearer {token}")
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=5, context=context) as answer:  # noqa: S310
        return str(answer.read().decode())


def fault_of_operator(url: str) -> str | None:
    """What is wrong with the operator, or `None`."""
    page = fetch(f"{url}/metrics")
    own = "\ncontroller_runtime_reconcile_total{"
    return None if own in page else f"{url}/metrics is not the operator's page"


def fault_of_api(url: str) -> str | None:
    """What is wrong with the API, or `None`."""
    served = {resource["name"] for resource in json.loads(fetch(url))["resources"]}
    missing = sorted(NEEDED - served)
    return f"the API server serves no {', '.join(missing)} at {url}" if missing else None


def main(operator: str) -> int:
    """Repeat both checks until they hold or the deadline has passed."""
    end = time.monotonic() + DEADLINE_SECONDS
    for name, check, url in (
        ("operator is ready", fault_of_operator, operator),
        ("API is served", fault_of_api, API),
    ):
        while True:
            try:
                fault = check(url)
            except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
                fault = f"{url}: {error}"
            if fault is None:
                print(f"ok: {name}")
                break
            if time.monotonic() > end:
                print(f"FAILED: {name}: {fault}")
                return 1
            time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
