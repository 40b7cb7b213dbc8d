"""Key files and the ring: every mistake is named, no key is shown, a reload takes all or nothing."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.config import Config, ServingConfig
from octavo.errors import ConfigError
from octavo.server.generation import cache_salt
from octavo.server.http.keys import ANONYMOUS, KeyInfo, KeyRing, with_key_weights

TOML = """
[[keys]]
name = "alice"
key = "sk-alice-secret"
tenant = "research"
requests_per_minute = 60
tokens_per_minute = 40000
max_concurrent = 4
priority = 1
max_priority = -5
weight = 2.0

[[keys]]
name = "bob"
key_sha256 = "{digest}"
""".replace("{digest}", hashlib.sha256(b"sk-bob-secret").hexdigest())
YAML = """
keys:
  - {name: alice, key: sk-alice-secret, tenant: research, weight: 2}
  - {name: bob, key: sk-bob-secret}
"""


def serving(path: Path, text: str, *keys: str) -> ServingConfig:
    path.write_text(text)
    path.chmod(0o600)
    return ServingConfig(api_key=keys, api_key_file=str(path))


def test_a_file_of_named_keys_is_read(tmp_path: Path) -> None:
    ring = KeyRing.of(serving(tmp_path / "keys.toml", TOML, "sk-flag"))
    alice, bob, flag = (ring.find(key) for key in (b"sk-alice-secret", b"sk-bob-secret", b"sk-flag"))
    assert alice is not None and bob is not None and flag is not None and ring.find(b"sk-alice") is None
    assert (alice.name, alice.tenant, alice.requests_per_minute, alice.tokens_per_minute) == (
        "alice", "research", 60, 40000,
    )  # fmt: skip
    assert (alice.max_concurrent, alice.priority, alice.max_priority, alice.weight) == (4, 1, -5, 2.0)
    assert (bob.name, bob.tenant, bob.requests_per_minute, bob.max_priority) == ("bob", "bob", None, None)
    assert (flag.name, flag.tenant) == ("key-1", hashlib.sha256(b"sk-flag").hexdigest())
    assert "secret" not in repr(ring.keys) and ring.keys
    again = KeyRing.of(serving(tmp_path / "keys.yaml", YAML))
    assert again.find(b"sk-bob-secret") is not None and again.find(b"sk-flag") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one list"),
        ("keys = []", "one list"),
        ("keys = 3", "one list"),
        ('[[keys]]\nname = "a"', "give either key or key_sha256"),
        ('[[keys]]\nname = "a"\nkey = "sk-topsecret"\nkey_sha256 = "' + "0" * 64 + '"', "give either"),
        ('[[keys]]\nname = "a b"\nkey = "sk-topsecret"', "name"),
        ('[[keys]]\nname = "a"\nkey = "sk"', "key has 2 characters; give one of at least 8"),
        ('[[keys]]\nname = "a"\nkey = "sk-topsecret"\ncolour = 1', "colour"),
        ('[[keys]]\nname = "a"\nkey = "sk-topsecret"\nrequests_per_minute = 0', "requests_per_minute"),
        ('[[keys]]\nname = "a"\nkey = "sk-topsecret"\npriority = 1\nmax_priority = 3', "more urgent"),
        ('[[keys]]\nname = "a"\nkey = "sk-topsecret"\n[[keys]]\nname = "a"\nkey = "sk-topsecret2"', "named 'a'"),
        ('[[keys]]\nname = "a"\nkey = "sk-topsecret"\n[[keys]]\nname = "b"\nkey = "sk-topsecret"', "the same key"),
        ('key = "sk-topsecret\n', "not well formed TOML"),
        ('[[keys]]\nname = "a"\nkey = "            "', "key begins or ends with white space"),
        ('[[keys]]\nname = "a"\nkey = "sk-topsecret\\n"', "key begins or ends with white space"),
        ('[[keys]]\nname = "a"\nkey = ""', "at least 8"),
        (f'[[keys]]\nname = "a"\nkey_sha256 = "{hashlib.sha256(b"").hexdigest()}"', "that of an empty key"),
    ],
)
def test_a_bad_file_is_refused_without_a_word_of_its_keys(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        KeyRing.of(serving(tmp_path / "keys.toml", text))
    assert "topsecret" not in str(refused.value)


def test_a_short_key_in_a_file_is_refused_where_others_reach_the_address(tmp_path: Path) -> None:
    made = serving(tmp_path / "keys.yaml", YAML)
    public = replace(made, host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"entry 1: key has 15 characters.*at least 16") as refused:
        KeyRing.of(public)
    assert "secret" not in str(refused.value)
    assert len(KeyRing.of(replace(public, insecure=True)).keys) == len(KeyRing.of(made).keys) == 2
    assert len(KeyRing.of(serving(tmp_path / "keys.yaml", YAML.replace("-secret", "-secret-and-long"))).keys) == 2


def test_an_empty_key_has_no_holder() -> None:
    empty = KeyInfo("a", "a", digest=hashlib.sha256(b"").digest())
    assert KeyRing([empty]).find(b"") is None


def test_bad_yaml_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not well formed YAML") as refused:
        KeyRing.of(serving(tmp_path / "keys.yaml", "keys: [sk-topsecret"))
    assert "topsecret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing.of(ServingConfig(api_key_file=str(tmp_path / "none.toml")))


def test_one_weight_a_tenant_and_weights_reach_the_policys_setting(tmp_path: Path) -> None:
    bad = YAML.replace("bob,", "bob, tenant: research, weight: 3,")
    with pytest.raises(ConfigError, match="one weight"):
        KeyRing.of(serving(tmp_path / "keys.yaml", bad))
    config = Config(serving=serving(tmp_path / "keys.yaml", YAML))
    assert with_key_weights(config).serving.tenant_weight == ("research=2.0",)
    assert with_key_weights(Config()) == Config()


def test_a_reload_takes_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    ring = KeyRing.of(serving(path, YAML))
    before = ring.keys
    path.write_text("keys: [")
    with pytest.raises(ConfigError):
        ring.reload()
    assert ring.keys == before  # their salts too
    path.write_text(YAML.replace("weight: 2", "weight: 4").replace("sk-bob-secret", "sk-carol-secret"))
    assert ring.reload() == "2 keys: 1 added, 1 removed, 1 changed"
    assert ring.find(b"sk-bob-secret") is None and ring.find(b"sk-carol-secret") is not None
    with pytest.raises(ConfigError, match="no --api-key-file"):
        KeyRing.of(ServingConfig(api_key=("sk-a",))).reload()


def test_a_tenants_salt_is_its_own_and_stays_through_a_reload(tmp_path: Path) -> None:
    ring = KeyRing.of(serving(tmp_path / "keys.yaml", YAML))
    research, bob = sorted(ring.keys, key=lambda info: info.tenant, reverse=True)
    salts = {cache_salt(key, given) for key in (research, bob) for given in (None, "x")}
    assert len(salts) == 4 and all(len(salt) == 32 for salt in salts)
    before = [key.salt for key in ring.keys]
    ring.reload()
    assert [key.salt for key in ring.keys] == before
    assert cache_salt(ANONYMOUS, "x") == b"x"


def test_keys_readable_by_others_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    given = serving(path, YAML)
    KeyRing.of(given)
    assert not caplog.records
    path.chmod(0o644)
    KeyRing.of(given)
    assert "chmod 600" in caplog.text and "secret" not in caplog.text
