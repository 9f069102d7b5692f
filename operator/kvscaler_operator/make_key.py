"""Make the admin key's Secret once: `python3 -m kvscaler_operator.make_key`, run by a chart hook.

Sidecars trust the public half, so a key that exists is never replaced: a running fleet would stop
obeying. That holds even when two of these race. The Secret is written by server-side apply under
a field manager of this run alone and without force, and the API server then refuses to change a
value that somebody else has set. Apply also carries the Secret's name in its request, so that the
right to do this can be given for one Secret.
"""

import argparse
import asyncio
import base64
import binascii
import sys
import uuid
from collections.abc import Sequence

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvscaler_operator.gateways.kube import ConflictError, KubeError, KubeGateway, connect
from kvscaler_operator.keys import KeyFileError, SigningKey
from kvscaler_operator.resources import Object, Resource

SECRETS = Resource("", "v1", "secrets", "Secret")
"""Only this command reads or writes Secrets; the operator has no right to."""


def new_key_pem() -> bytes:
    """A fresh Ed25519 private key as unencrypted PKCS#8 PEM."""
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


async def ensure_key(kube: KubeGateway, namespace: str, name: str, key: str) -> tuple[str, bool]:
    """Key id of the Secret's key, and whether it was made now.

    Raises `KeyFileError` when the Secret holds something else: it is not ours to overwrite.
    """
    live = await kube.find(SECRETS, namespace, name)
    if live is None:
        document: Object = {
            "apiVersion": SECRETS.api_version,
            "kind": SECRETS.kind,
            "metadata": {
                "namespace": namespace,
                "name": name,
                "labels": {"app.kubernetes.io/part-of": "kvscaler"},
            },
            "type": "Opaque",
            "data": {key: base64.b64encode(new_key_pem()).decode()},
        }
        manager = f"kvscaler-make-key-{uuid.uuid4().hex[:8]}"
        try:
            live = await kube.apply(SECRETS, document, force=False, manager=manager)
        except ConflictError:
            live = await kube.get(SECRETS, namespace, name)
        else:
            return _stored(live, namespace, name, key).key_id, True
    return _stored(live, namespace, name, key).key_id, False


def _stored(secret: Object, namespace: str, name: str, key: str) -> SigningKey:
    where = f"key {key!r} of Secret {namespace}/{name}"
    text = (secret.get("data") or {}).get(key)
    if text is None:
        raise KeyFileError(
            f"{where} does not exist: set adminKey.secretKey to the key that holds the private key,"
            " or delete the Secret to have a new one made"
        )
    try:
        pem = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise KeyFileError(f"{where} is not base64: {error}") from error
    return SigningKey.from_pem(pem, where)


async def _run(namespace: str, name: str, key: str) -> int:
    kube = KubeGateway(await connect(None, None))
    try:
        key_id, made = await ensure_key(kube, namespace, name, key)
    except (KubeError, KeyFileError) as error:
        print(f"admin key: {error}", file=sys.stderr)
        return 1
    finally:
        await kube.close()
    print(f"admin key {key_id} in Secret {namespace}/{name}: {'made' if made else 'kept'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the Secret holds a usable key, made now or earlier."""
    parser = argparse.ArgumentParser(
        prog="python3 -m kvscaler_operator.make_key", description="Make the admin key, once."
    )
    parser.add_argument("--namespace", required=True, help="namespace of the Secret")
    parser.add_argument("--secret", required=True, help="name of the Secret")
    parser.add_argument("--key", required=True, help="key of the Secret that holds the PEM")
    options = parser.parse_args(arguments)
    return asyncio.run(_run(options.namespace, options.secret, options.key))


if __name__ == "__main__":
    sys.exit(main())
