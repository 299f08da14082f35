"""Keys: a file of hashes that is checked, read again when it changes, and made by a command."""

import json
import os

import pytest
from click.testing import CliRunner

from swarm.errors import BadConfiguration
from swarm.gateway.admission import TenantLimits
from swarm.gateway.cli import command
from swarm.gateway.keys import KeyLimits, Keys, digest_of, new_key, parse, read

ADA, BOB = "sk-swarm-ada", "sk-swarm-bob"
FILE = {
    "ada": {"sha256": [digest_of(ADA)], "concurrency": 2, "tokens_per_minute": 100, "models": ["org/name"]},
    "bob": {"sha256": [digest_of(BOB), digest_of("older")]},
}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys.json"
    put(path, FILE)
    return path


def put(path, contents):
    text = contents if isinstance(contents, str) else json.dumps(contents)
    path.write_text(text)
    path.chmod(0o600)


def test_keys_lead_to_tenants_with_their_limits(path):
    keys = Keys(path, Clock())
    ada, bob = keys.tenant(ADA), keys.tenant("older")
    assert (ada.name, ada.limits, ada.models) == (
        "ada",
        TenantLimits(running_max=2, tokens_per_minute=100),
        {"org/name"},
    )
    assert (ada.may_use("org/name"), ada.may_use("org/other"), bob.may_use("org/other")) == (True, False, True)
    assert bob.name == "bob"
    assert keys.tenant("sk-swarm-eve") is keys.tenant("") is None


def test_every_key_is_compared_in_constant_time(path, monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append(a) or a == b)
    assert Keys(path, Clock()).tenant(ADA).name == "ada"
    assert sorted(compared) == sorted(digest for entry in FILE.values() for digest in entry["sha256"])


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o666])
def test_file_that_others_can_use_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(BadConfiguration, match="chmod 600"):
        Keys(path, Clock())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "dictionary"),
        ("[" * 100_000, "not JSON"),
        ('{"ada": {}}', "ada.sha256"),
        ('{"ada": {"sha256": []}}', "ada.sha256"),
        ('{"ada": {"sha256": ["abc"]}}', "ada.sha256.0"),
        (json.dumps({"ada": {**FILE["ada"], "concurrency": 0}}), "ada.concurrency"),
        (json.dumps({"ada": {**FILE["ada"], "tokens": 5}}), "ada.tokens"),
        (json.dumps({"a b": FILE["ada"]}), "a b"),
        (json.dumps({"ada": FILE["ada"], "eve": FILE["ada"]}), "one key is there twice"),
        (json.dumps({"ada": FILE["ada"]})[:-1] + ', "ada": {}}', "a name is there twice"),
    ],
)
def test_malformed_file_is_refused_with_its_place(text, says):
    with pytest.raises(BadConfiguration) as refused:
        parse(text.encode(), "keys")
    assert says in str(refused.value)
    assert digest_of(ADA) not in str(refused.value)


def test_file_with_too_many_keys_is_refused():
    with pytest.raises(BadConfiguration, match="more than 2 keys"):
        parse(json.dumps(FILE).encode(), "keys", KeyLimits(keys_max=2))


def test_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(BadConfiguration, match="swarm-gateway keys add"):
        Keys(tmp_path / "none", Clock())


def test_changed_file_is_read_again(path):
    clock = Clock()
    keys = Keys(path, clock)
    put(path, {"bob": FILE["bob"]})
    assert keys.tenant(ADA) is not None  # looked at a moment ago
    clock.now = 2.0
    assert keys.tenant(ADA) is None
    assert keys.tenant(BOB).name == "bob"


@pytest.mark.parametrize("spoil", [lambda path: put(path, "{"), lambda path: path.chmod(0o644), os.unlink])
def test_keys_stay_while_the_file_cannot_be_used(path, spoil):
    clock = Clock()
    keys = Keys(path, clock)
    spoil(path)
    clock.now = 2.0
    assert keys.tenant(ADA) is not None
    assert keys.problem
    put(path, {"bob": FILE["bob"]})
    clock.now = 4.0
    assert keys.tenant(ADA) is None
    assert keys.problem == ""


def test_new_keys_differ():
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) > 40


# The command


def run(path, *arguments, code=0):
    result = CliRunner().invoke(command, ["keys", *arguments, "--keys", str(path)], catch_exceptions=True)
    if code:
        assert result.exception is not None
        return str(result.exception)
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_command_adds_a_key_that_is_shown_once(tmp_path):
    path = tmp_path / "keys.json"
    key = run(path, "add", "ada", "--concurrency", "3", "--model", "org/name")
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    tenant = Keys(path, Clock()).tenant(key)
    assert (tenant.name, tenant.limits.running_max, tenant.models) == ("ada", 3, {"org/name"})


def test_second_key_of_a_name_keeps_limits_and_the_first(path):
    key = run(path, "add", "ada")
    keys = Keys(path, Clock())
    assert keys.tenant(key) == keys.tenant(ADA)
    assert keys.tenant(key).limits.running_max == 2


def test_command_lists_names_without_keys(path):
    listed = run(path, "list")
    assert "ada" in listed
    assert "concurrency=2" in listed
    assert digest_of(ADA) not in listed


def test_command_removes_one_key_or_all_of_a_name(path):
    run(path, "remove", "bob", "--sha256", digest_of("older")[:8])
    assert read(path).root["bob"].sha256 == (digest_of(BOB),)
    run(path, "remove", "bob")
    assert set(read(path).root) == {"ada"}
    assert "no 'bob'" in run(path, "remove", "bob", code=2)


def test_command_refuses_names_that_logs_could_not_show(path):
    before = path.read_text()
    assert "cannot be added" in run(path, "add", "a\nb", code=2)
    assert path.read_text() == before
