"""The hook that makes the admin key, with exactly the rights that the chart gives it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvscaler_operator import make_key
from kvscaler_operator.gateways.kube import ForbiddenError, KubeGateway, connect
from kvscaler_operator.keys import KeyFileError, SigningKey
from localcluster.handle import ClusterHandle

pytestmark = pytest.mark.apiserver
NAMESPACE = "kvscaler-system"
NAME = "kvscaler-admin-key"
KEY = "key.pem"


@pytest.fixture(scope="module")
def account(apiserver: ClusterHandle, chart: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig of the hook's ServiceAccount, with the Role that the chart renders for it."""
    hook = [
        o for o in chart.render() if o["metadata"]["name"] == f"{NAME}-hook" and o["kind"] != "Job"
    ]
    assert [o["kind"] for o in hook] == ["ServiceAccount", "Role", "RoleBinding"]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    apiserver.apply(namespace, *hook)
    token = apiserver.kubectl("create", "token", f"{NAME}-hook", "-n", NAMESPACE).strip()
    config = yaml.safe_load(apiserver.kubeconfig.read_text("utf-8"))
    for user in config["users"]:
        user["user"] = {"token": token}
    path = tmp_path_factory.mktemp("account") / "kubeconfig"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@pytest.fixture
async def kube(account: Path, apiserver: ClusterHandle) -> AsyncIterator[KubeGateway]:
    gateway = KubeGateway(await connect(str(account), apiserver.context))
    yield gateway
    await gateway.close()


@pytest.fixture(autouse=True)
def no_secret(apiserver: ClusterHandle) -> Iterator[None]:
    yield
    apiserver.kubectl("delete", "secrets", "--all", "-n", NAMESPACE)


def stored(apiserver: ClusterHandle) -> bytes:
    secret = apiserver.get("secret", NAME, "-n", NAMESPACE)
    return base64.b64decode(secret["data"][KEY])


async def test_a_key_is_made_once_and_kept(apiserver: ClusterHandle, kube: KubeGateway) -> None:
    key_id, made = await make_key.ensure_key(kube, NAMESPACE, NAME, KEY)
    assert made
    pem = stored(apiserver)
    assert SigningKey.from_pem(pem, "the Secret").key_id == key_id

    assert await make_key.ensure_key(kube, NAMESPACE, NAME, KEY) == (key_id, False)
    assert stored(apiserver) == pem


async def test_two_hooks_at_once_agree_on_one_key(
    apiserver: ClusterHandle, kube: KubeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def not_there_yet(*_: Any) -> None:
        """Both looked before either wrote."""

    monkeypatch.setattr(kube, "find", not_there_yet)
    answers = await asyncio.gather(
        *(make_key.ensure_key(kube, NAMESPACE, NAME, KEY) for _ in range(4))
    )
    key_id = SigningKey.from_pem(stored(apiserver), "the Secret").key_id
    assert {answer[0] for answer in answers} == {key_id}
    assert sorted(made for _, made in answers) == [False, False, False, True]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({KEY: "bm90IGEga2V5"}, "no unencrypted private key"),
        ({"other": "eA=="}, "does not exist"),
    ],
)
async def test_a_secret_that_holds_something_else_is_refused_and_left_alone(
    apiserver: ClusterHandle, kube: KubeGateway, data: dict[str, str], words: str
) -> None:
    apiserver.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"namespace": NAMESPACE, "name": NAME},
            "data": data,
        }
    )
    with pytest.raises(KeyFileError, match=words):
        await make_key.ensure_key(kube, NAMESPACE, NAME, KEY)
    assert apiserver.get("secret", NAME, "-n", NAMESPACE)["data"] == data


async def test_the_rights_end_at_this_one_secret(kube: KubeGateway) -> None:
    with pytest.raises(ForbiddenError):
        await make_key.ensure_key(kube, NAMESPACE, "another", KEY)
    document = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"namespace": NAMESPACE, "name": "another"},
    }
    with pytest.raises(ForbiddenError):
        await kube.apply(make_key.SECRETS, document, force=False)
    with pytest.raises(ForbiddenError):
        await kube.create(make_key.SECRETS, document)
    with pytest.raises(ForbiddenError):
        await kube.list(make_key.SECRETS, NAMESPACE)


def test_the_chart_and_the_command_agree(chart: Any) -> None:
    (job,) = (o for o in chart.render() if o["kind"] == "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python3", "-m", make_key.__name__]
    assert container["args"] == [f"--namespace={NAMESPACE}", f"--secret={NAME}", f"--key={KEY}"]
    assert json.dumps(job).count(NAME) > 1
