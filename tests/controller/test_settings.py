"""Settings from flags, variables and the file of Prometheus servers; keys from a file."""

from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from kvscaler.protocol import tokens
from kvscaler_operator.keys import KeyFile, KeyFileError
from kvscaler_operator.main import MISUSED, main
from kvscaler_operator.settings import SettingsError, load, parse_arguments, prometheus_servers
from kvscaler_operator.signals import SignalPath


def test_a_flag_wins_over_its_variable_over_the_default() -> None:
    environment = {"KVSCALER_TICK_SECONDS": "2", "KVSCALER_NAMESPACES": "a, b"}
    settings = load({"tick_seconds": "3"}, environment)
    assert settings.tick_seconds == 3
    assert settings.namespaces == ("a", "b")
    assert settings.signal_paths == set(SignalPath)


def test_signal_paths_can_be_chosen() -> None:
    assert parse_arguments(["--signal-paths=direct"]).signal_paths == {SignalPath.DIRECT}


def test_everything_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tick-seconds=0", "--signal-paths=smoke", "--log-format=xml"]
    with pytest.raises(SettingsError) as raised:
        parse_arguments(arguments)
    text = str(raised.value)
    assert all(flag in text for flag in ("--tick-seconds", "--signal-paths", "--log-format"))
    assert main(arguments) == MISUSED
    assert "--tick-seconds" in capsys.readouterr().err


def test_servers_are_read_by_name(tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text(
        "servers:\n"
        "  default: {url: 'http://prometheus:9090'}\n"
        "  mimir: {url: 'https://mimir', bearerTokenFile: /t, headers: {X-Scope-OrgID: a}}\n"
    )
    servers = prometheus_servers(file)
    assert servers["default"].url == "http://prometheus:9090"
    assert servers["mimir"].bearer_token_file == Path("/t")
    assert servers["mimir"].headers == {"X-Scope-OrgID": "a"}
    assert prometheus_servers(None) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("servers: [1]", "must hold a map"),
        ("servers: {a: {}}", "'a' needs a url"),
        ("servers: {a: {url: 'file:///etc/passwd'}}", "must begin with http"),
        ("servers: {a: {url: 'http://x', password: y}}", "knows no password"),
        ("servers: {", "cannot read"),
    ],
)
def test_a_bad_file_of_servers_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=words):
        prometheus_servers(file)


def write_key(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return key


def test_a_token_is_bound_to_one_request(tmp_path: Path) -> None:
    private = write_key(tmp_path / "key.pem")
    key = KeyFile(tmp_path / "key.pem").current()
    token = key.token(
        service_uid="s", pod_uid="p", method="PUT", path=tokens.LIMITS_PATH, body=b"{}", now=1000.6
    )
    assert jwt.get_unverified_header(token)["kid"] == key.key_id
    claims = jwt.decode(
        token,
        private.public_key(),
        algorithms=["EdDSA"],
        audience="s/p",
        options={"verify_exp": False, "verify_iat": False},
    )
    assert claims["scope"] == "limits:write"
    assert claims["exp"] - claims["iat"] == 60
    assert claims["bsh"] == tokens.body_hash(b"{}")
    with pytest.raises(ValueError, match="no POST"):
        key.token(service_uid="s", pod_uid="p", method="POST", path="/x", body=b"")


def test_a_rotated_key_is_read_and_both_are_trusted(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    write_key(path)
    keys = KeyFile(path)
    first = keys.current().key_id
    assert list(keys.public_keys()) == [f"{first}.pem"]
    path.unlink()
    write_key(path)
    second = keys.current().key_id
    assert second != first
    assert set(keys.public_keys()) == {f"{first}.pem", f"{second}.pem"}


def test_a_key_that_is_none_is_said(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    with pytest.raises(KeyFileError, match=r"adminKey\.secretName"):
        KeyFile(path).current()
    path.write_text("nonsense")
    with pytest.raises(KeyFileError, match="no unencrypted private key"):
        KeyFile(path).current()
    path.write_bytes(
        generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(KeyFileError, match="an Ed25519 key is needed"):
        KeyFile(path).current()


def test_the_operators_folder_never_shadows_the_standard_library() -> None:
    root = Path(__file__).resolve().parents[2]
    assert not (root / "operator" / "__init__.py").exists()
