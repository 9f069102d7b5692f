"""The few calls to the API server that starting a cluster needs, without a client library."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localcluster.steps import ClusterError

FIELD_MANAGER = "kvscaler-local-cluster"
TIMEOUT_SECONDS = 5


class Api:
    """Calls as the cluster's administrator, with the certificates of its `pki` folder."""

    def __init__(self, server: str, pki: Path) -> None:
        self._netloc = urlsplit(server).netloc
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """HTTP status and body. A refused or broken connection raises OSError."""
        connection = http.client.HTTPSConnection(
            self._netloc, context=self._tls, timeout=TIMEOUT_SECONDS
        )
        try:
            headers = {"Content-Type": "application/apply-patch+yaml"}  # of which JSON is a part
            encoded = None if body is None else json.dumps(body)
            connection.request(method, path, encoded, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(f"{self._netloc}: {error!r}") from error
        finally:
            connection.close()

    def ready(self) -> bool:
        try:
            return self.request("GET", "/readyz")[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def get(self, path: str) -> dict[str, Any] | None:
        """The object at `path`, or None when it is not there (or the server is not)."""
        try:
            status, body = self.request("GET", path)
        except OSError:
            return None
        if status != http.HTTPStatus.OK:
            return None
        found: dict[str, Any] = json.loads(body)
        return found

    def apply(self, collection: str, manifest: dict[str, Any]) -> None:
        """Server-side apply of one object, e.g. to `/api/v1/namespaces/default/services`."""
        name = manifest["metadata"]["name"]
        query = f"fieldManager={FIELD_MANAGER}&force=true"
        status, body = self.request("PATCH", f"{collection}/{name}?{query}", manifest)
        if status >= http.HTTPStatus.BAD_REQUEST:
            raise ClusterError(f"{manifest['kind']} {name} was not accepted: {body.decode()}")

    def delete(self, path: str) -> None:
        """Delete the object at `path`; fine when it is not there."""
        status, body = self.request("DELETE", path)
        if status >= http.HTTPStatus.BAD_REQUEST and status != http.HTTPStatus.NOT_FOUND:
            raise ClusterError(f"{path} was not deleted: {body.decode()}")
