"""The settings that commands share: files, the environment, and what is no setting."""

import pytest

from swarm.config import load_settings
from swarm.errors import BadConfiguration


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_swarm_gateway_in_the_environment_is_an_option_of_servers_and_leaves_the_files_alone(tmp_path, monkeypatch):
    (tmp_path / "swarm.toml").write_text('[[gateway.upstream]]\nurl = "http://127.0.0.1/v1"\nmodels = {a = "b"}\n')
    monkeypatch.setenv("SWARM_GATEWAY", "12D3KooWexample=512,500,100000")
    monkeypatch.setenv("SWARM_NETWORK", "ours")
    settings = load_settings()
    assert settings.network == "ours"
    assert [upstream.models for upstream in settings.gateway.upstream] == [{"a": "b"}]


def test_an_option_of_one_command_in_the_file_is_refused_with_the_places_where_it_may_stand(tmp_path):
    (tmp_path / "swarm.toml").write_text('blocks = "0:6"\n')
    with pytest.raises(BadConfiguration, match=r"blocks: swarm.toml has no such setting: pass it as an option"):
        load_settings()


def test_a_malformed_setting_in_the_file_says_what_is_wrong(tmp_path):
    (tmp_path / "swarm.toml").write_text('directory = "phone book"\n')
    with pytest.raises(BadConfiguration, match=r"directory: Input should be 'auto', 'p2pd' or 'light'"):
        load_settings()
