"""The keys that requests prove themselves with: a JSON file of names, hashes and limits, read again when it changes.

    {
      "ada": {"sha256": ["9f86d081..."], "concurrency": 4, "requests_per_minute": 60, "tokens_per_minute": 100000,
              "models": ["org/name"]},
      "bob": {"sha256": ["60303ae2..."]}
    }

A key is 32 random bytes, so that its SHA-256 tells nothing about it. Several keys of one name are one tenant: add the
new one, give it out, remove the old one.
"""

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints, ValidationError

from swarm.errors import BadConfiguration
from swarm.gateway.admission import TenantLimits
from swarm.gateway.grant import Grant
from swarm.limits import limit
from swarm.permissions import is_open

_log = structlog.get_logger("swarm.gateway")

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Limit = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Bounds of the key file."""

    bytes_max: int = limit(1 << 20, "bytes", "a longer file is refused")
    keys_max: int = limit(1024, "keys", "of all names together; a file with more is refused")
    look_s: float = limit(1.0, "s", "the file is looked at this often, while there are requests")


class Entry(BaseModel):
    """The keys and limits of one name."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    sha256: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=16, strict=False)]
    concurrency: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    models: Annotated[tuple[str, ...], Field(strict=False)] | None = None


class KeyFile(RootModel[dict[Name, Entry]]):
    """The contents of a key file."""

    model_config = ConfigDict(frozen=True)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of requests: its name, its limits, and the models that it may use; None for all."""

    name: str = ""
    limits: TenantLimits = field(default_factory=TenantLimits)
    models: frozenset[str] | None = None

    def may_use(self, model: str) -> bool:
        """Whether this tenant's requests may name a model."""
        return self.models is None or model in self.models


ANYONE = Tenant()  # where there are no keys


class Keys:
    """The keys of one file."""

    def __init__(self, path: Path, now: Callable[[], float], limits: KeyLimits | None = None) -> None:
        """Read the file. Raises BadConfiguration."""
        self.problem = ""  # why the file as it is now is not used
        self._path = path
        self._now = now
        self._limits = limits or KeyLimits()
        self._looked_at = now()
        self._seen = _version(path)
        self._tenants = tenants_of(read(path, self._limits))
        self._held: dict[Grant, tuple[str, str]] = {}  # digest and tenant's name, of requests under way
        self._timer: asyncio.TimerHandle | None = None  # looks at the file while there are any

    def tenant(self, key: str) -> Tenant | None:
        """Return the owner of a key. All keys are compared, and each in constant time."""
        self._look()
        digest, found = digest_of(key), None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    @contextmanager
    def held(self, key: str, tenant: Tenant, grant: Grant) -> Iterator[None]:
        """Revoke a request's right if its key is removed, or becomes another tenant's, within the block."""
        self._held[grant] = (digest_of(key), tenant.name)
        self._timer = self._timer or self._looks_later()
        try:
            yield
        finally:
            self._held.pop(grant, None)
            if not self._held and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _looks_later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._limits.look_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = self._looks_later()
        self._look()

    def _revoke(self) -> None:
        """Revoke the requests whose keys are not there any more."""
        for grant, (digest, name) in list(self._held.items()):
            tenant = self._tenants.get(digest)
            if tenant is None or tenant.name != name:
                del self._held[grant]
                grant.revoke()

    def _look(self) -> None:
        """Read the file again if it has changed. While it cannot be used, the keys that were read last stay."""
        if self._now() - self._looked_at < self._limits.look_s:
            return
        self._looked_at = self._now()
        seen = _version(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._tenants = tenants_of(read(self._path, self._limits))
        except BadConfiguration as error:
            self.problem = str(error)
            _log.error("the keys that were read before stay", why=self.problem)
        else:
            self.problem = ""
            _log.info("keys read again", keys=len(self._tenants))
            self._revoke()


def tenants_of(file: KeyFile) -> dict[str, Tenant]:
    """Return the tenants by the digests of their keys."""
    tenants: dict[str, Tenant] = {}
    for name, entry in file.root.items():
        limits = TenantLimits(entry.concurrency, entry.requests_per_minute, entry.tokens_per_minute)
        models = None if entry.models is None else frozenset(entry.models)
        tenants |= dict.fromkeys(entry.sha256, Tenant(name, limits, models))
    return tenants


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key, 64 hex digits."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def new_key() -> str:
    """Make a key."""
    return "sk-swarm-" + secrets.token_urlsafe(32)


# --- the file --------------------------------------------------------------------------------------------------------


def read(path: Path, limits: KeyLimits | None = None) -> KeyFile:
    """Read a key file. Raises BadConfiguration."""
    limits, setting = limits or KeyLimits(), f"keys {path}"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(limits.bytes_max + 1)
    except FileNotFoundError:
        why = f"there is no such file; to make one: swarm-gateway keys add NAME --keys {path}"
        raise BadConfiguration(setting, why) from None
    except OSError as error:
        raise BadConfiguration(setting, error.strerror or str(error)) from None
    if is_open(mode, 0o027):  # the group may read: a credential of systemd shows its access list as the group's bits
        raise BadConfiguration(setting, f"others can read it, or the group can write it; run: chmod 600 {path}")
    if len(data) > limits.bytes_max:
        raise BadConfiguration(setting, f"it has more than {limits.bytes_max} bytes")
    return parse(data, setting, limits)


def parse(data: bytes, setting: str, limits: KeyLimits | None = None) -> KeyFile:
    """Return the contents of a key file. Raises BadConfiguration with the first thing that is wrong."""
    limits = limits or KeyLimits()
    try:
        file = KeyFile.model_validate(json.loads(data, object_pairs_hook=_unique))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadConfiguration(setting, f"{where}: {first['msg']}" if where else first["msg"]) from None
    except (ValueError, RecursionError) as error:
        raise BadConfiguration(setting, f"it is not JSON: {error}") from None
    digests = [digest for entry in file.root.values() for digest in entry.sha256]
    if len(set(digests)) < len(digests):
        raise BadConfiguration(setting, "one key is there twice")
    if len(digests) > limits.keys_max:
        raise BadConfiguration(setting, f"it has more than {limits.keys_max} keys")
    return file


def write(path: Path, file: KeyFile) -> None:
    """Write a key file in one step, for its owner's eyes alone. Raises BadConfiguration."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(file.model_dump_json(indent=2, exclude_none=True) + "\n")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BadConfiguration(f"keys {path}", error.strerror or str(error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _version(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes with the file; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode
