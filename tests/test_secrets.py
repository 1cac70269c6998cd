from __future__ import annotations

import base64
import json
from importlib import metadata
from urllib.parse import quote

import pytest

from agentmesh_dagster.errors import DefinitionError, ModelError
from agentmesh_dagster.runtime.secrets import (
    EnvironmentSecrets,
    Redactor,
    SecretMissing,
    Secrets,
    load_provider,
)

VALUE = 'p@ss/w0rd "quoted"\n&more'


def secrets_with(**values: str) -> Secrets:
    secrets = Secrets(EnvironmentSecrets(values))
    for name in values:
        secrets.of_deployment(name)
    return secrets


@pytest.mark.parametrize("before", ["", "a", "ab", "Bearer ", "user:"])
@pytest.mark.parametrize("after", ["", "z", "zz"])
def test_no_character_of_an_encoded_value_is_left(before: str, after: str):
    secret = "s3cret-value-of-the-service"
    redactor = Redactor([secret])
    whole = (before + secret + after).encode()
    for encoded in (base64.b64encode(whole).decode(), base64.urlsafe_b64encode(whole).decode()):
        shown = redactor.redact(f"<{encoded}>")
        assert "***" in shown
        left = shown.strip("<>").split("***")
        # At most what encodes the neighbours alone.
        assert len(left[0]) <= -(-len(before) * 8 // 6)
        assert len(left[1].rstrip("=")) <= -(-len(after) * 8 // 6)
    assert (
        redactor.redact(f"hex {secret.encode().hex()} HEX {secret.encode().hex().upper()}")
        == "hex *** HEX ***"
    )


def test_a_short_value_is_no_part_of_other_words():
    redactor = Redactor(["test"])
    assert (
        redactor.redact("the latest contest: test, 'test' and test-1")
        == "the latest contest: ***, '***' and ***-1"
    )


def test_nothing_given_out_leaves_values_as_they_are() -> None:
    value = {"a": ["text"]}
    assert Secrets(EnvironmentSecrets({"KEY": "text"})).redact(value) is value


def test_missing_secret_says_how_to_set_it() -> None:
    with pytest.raises(
        SecretMissing, match=r"'CRM_KEY' is not configured: set the environment variable 'CRM_KEY'"
    ):
        Secrets(EnvironmentSecrets({})).of_deployment("CRM_KEY")
    with pytest.raises(SecretMissing, match="is empty") as caught:
        Secrets(EnvironmentSecrets({"CRM_KEY": ""})).of_deployment("CRM_KEY")
    assert caught.value.code == "secret-missing"


@pytest.mark.parametrize(
    "surfaced",
    [
        VALUE,
        quote(VALUE),
        quote(VALUE, safe=""),
        json.dumps(VALUE),
        repr(VALUE),
        base64.b64encode(VALUE.encode()).decode(),
        base64.b64encode(b"user:" + VALUE.encode()).decode(),
        base64.b64encode(b"a:" + VALUE.encode() + b":z").decode(),
        base64.urlsafe_b64encode(b"me:" + VALUE.encode()).decode(),
    ],
)
def test_every_form_is_redacted(surfaced: str) -> None:
    redacted = secrets_with(KEY=VALUE).redact(f"before {surfaced} after")
    assert redacted.startswith("before ")
    assert redacted.endswith(" after")
    assert "***" in redacted
    assert "w0rd" not in redacted
    assert surfaced[6:-6] not in redacted


def test_redaction_reaches_keys_and_all_levels() -> None:
    secrets = secrets_with(KEY="topsecret")
    value = {"topsecret": [1, None, {"x": "a topsecret b"}], "n": 1.5}
    assert secrets.redact(value) == {"***": [1, None, {"x": "a *** b"}], "n": 1.5}


def test_longer_secret_goes_first_and_short_ones_are_not_remembered() -> None:
    secrets = secrets_with(A="abcd", B="abcdefgh", C="a")
    assert secrets.redact("abcdefgh abcd a") == "*** *** a"


def test_errors_lose_their_secrets() -> None:
    secrets = secrets_with(KEY="topsecret")
    error = secrets.scrub(ModelError("no topsecret", provider="openai", context={"url": "x?key=topsecret"}))
    assert "topsecret" not in str(error) + json.dumps(error.to_json()) + repr(error)
    assert secrets.redact_error(ValueError("bad topsecret")) == {
        "code": "unexpected",
        "domain": "node",
        "category": "system",
        "message": "ValueError: bad ***",
    }


class Vault:
    def get(self, name: str) -> str | None:
        return {"KEY": "from the vault"}.get(name)


def test_provider_comes_from_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("vault", f"{__name__}:Vault", "agentmesh_dagster.secrets")
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [point] if group == point.group else [])
    monkeypatch.setenv("AGENTMESH_SECRETS_PROVIDER", "vault")
    secrets = Secrets(load_provider())
    assert secrets.of_deployment("KEY") == "from the vault"
    with pytest.raises(SecretMissing, match="Vault"):
        secrets.of_deployment("OTHER")


def test_unknown_provider_is_named_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTMESH_SECRETS_PROVIDER", "vualt")
    with pytest.raises(DefinitionError, match=r"no secrets provider 'vualt'.*'environment'"):
        load_provider()
    monkeypatch.delenv("AGENTMESH_SECRETS_PROVIDER")
    monkeypatch.setenv("SOME_KEY", "value")
    assert load_provider().get("SOME_KEY") == "value"
