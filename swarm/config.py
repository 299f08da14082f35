"""Settings that commands and the client share: environment variables (SWARM_*), then swarm.toml, then defaults."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from swarm.errors import BadConfiguration

NETWORK_PATTERN = r"^[a-z0-9-]{1,32}$"
PROTOCOL_VERSION = 1  # the major version: peers of different majors do not talk
Way = Literal["auto", "p2pd", "light"]  # into the directory: see swarm.dht.reading
CACHE_DIR = Path(platformdirs.user_cache_dir("swarm"))
DATA_DIR = Path(platformdirs.user_data_dir("swarm"))


class UpstreamSettings(BaseModel):
    """One `[[gateway.upstream]]`: a server of OpenAI's API that holds models whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(description="up to /v1, as http://127.0.0.1:11434/v1", pattern=r"^https?://[^\s?#]+$")
    models: dict[str, str] = Field(description="the names that requests say, and the server's own", min_length=1)
    when: Literal["prefer", "fallback"] = Field("fallback", description="before the swarm, or where it has no route")
    key_file: Path | None = Field(None, description="holds the server's key, and nothing else")
    remote: bool = Field(False, description="prompts may leave this machine in clear; loopback needs no such word")


class GatewaySettings(BaseModel):
    """`[gateway]`: what `swarm-gateway` has beside its options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: tuple[UpstreamSettings, ...] = ()


class _Environment(EnvSettingsSource):
    """The environment without SWARM_GATEWAY, which is an option of `swarm-serve`."""

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if name != "gateway"}


class Settings(BaseSettings):
    """The settings in `swarm.toml` or, as SWARM_<NAME>, in the environment. Command-line options win over both."""

    model_config = SettingsConfigDict(
        env_prefix="SWARM_",
        frozen=True,
        extra="forbid",
        toml_file=(Path(platformdirs.user_config_dir("swarm"), "swarm.toml"), Path("swarm.toml")),  # later ones win
    )

    model: str | None = Field(None, description="hub id or local directory")
    revision: str | None = Field(None, description="branch, tag or commit of a hub repository")
    initial_peers: Annotated[tuple[str, ...], NoDecode] = Field((), description="multiaddrs, split at commas or spaces")
    network: str = Field("public", description="swarms of different names do not mix", pattern=NETWORK_PATTERN)
    network_key: Path | None = Field(None, description="key file of a private swarm")
    allow_peers: Path | None = Field(None, description="list of the peers that may take part")
    lan: bool = Field(True, description="find others on this network, and be found there")
    identity: Path | None = Field(None, description="key file")
    cache_dir: Path | None = Field(None, description="where the hub's files are kept")
    directory: Way = Field("auto", description="how a client reads the directory")
    p2pd_sha256: str | None = Field(None, description="a p2pd that replaces hivemind's", pattern="^[0-9a-f]{64}$")
    log_level: str | None = Field(None, pattern="^(debug|info|warning|error)$")
    gateway: Annotated[GatewaySettings, NoDecode] = Field(GatewaySettings(), description="in a file only")

    @field_validator("initial_peers", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:  # noqa: ANN401 - a raw setting is anything
        return tuple(part for part in re.split(r"[,\s]+", value) if part) if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_: PydanticBaseSettingsSource, **sources: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Explicit arguments, then the environment, then the files."""
        return sources["init_settings"], _Environment(settings_cls), TomlConfigSettingsSource(settings_cls)


def is_root(text: str) -> bool:
    """Whether text has the form of a checkpoint's root, or of a pin: the root, a plus, and the texts' digest."""
    return re.fullmatch(r"[0-9a-f]{64}(\+[0-9a-f]{64})?", text) is not None


def load_settings() -> Settings:
    """Read the settings. Raises BadConfiguration with the first thing that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        is_unknown = first["type"] == "extra_forbidden" and len(first["loc"]) == 1
        why = "swarm.toml has no such setting: pass it as an option, or as SWARM_..." if is_unknown else first["msg"]
        raise BadConfiguration(name, why) from None
    except ValueError as error:  # a TOML file that does not parse
        raise BadConfiguration("swarm.toml", str(error)) from None
