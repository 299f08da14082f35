"""A repository of the Hugging Face hub as a source of files: listed, hashed and fetched."""

import contextlib
import errno
import hashlib
import logging
import os
import shutil
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm import config as settings
from swarm.errors import DownloadFailed, ModelNotFound, UnsupportedCheckpoint
from swarm.model.manifest import Digest, Manifest, sha256_of, write_atomically

logger = logging.getLogger(__name__)


class HubFile(BaseModel):
    """The facts of a file that the hub sends without the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size_bytes: int = Field(ge=0)
    sha256: Digest | None  # None: a small file outside of LFS


class Listing(BaseModel):
    """The facts of a revision; kept, so that a server starts again while the hub is away."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    commit: str = Field(pattern=r"^[0-9a-f]{40}$|^main$")
    files: dict[str, HubFile]


class HubSource:
    """One commit of a repository."""

    def __init__(
        self,
        repository: str,
        *,
        revision: str | None,
        token: str | None,
        cache_dir: Path | None,
        max_disk_bytes: int | None,
        endpoint: str | None,
    ) -> None:
        """Ask the hub for the commit and its files. Raises ModelNotFound or DownloadFailed."""
        self.repository = repository
        self._token = token
        self._cache_dir = cache_dir if cache_dir is not None else Path(constants.HF_HUB_CACHE)
        self._max_disk_bytes = max_disk_bytes
        self._endpoint = endpoint
        key = hashlib.sha256(f"{endpoint}\n{repository}\n{revision}".encode()).hexdigest()[:40]
        listing = self._look_up(revision, settings.CACHE_DIR / "hub" / f"{key}.json")
        self.commit, self._files = listing.commit, listing.files

    def names(self) -> tuple[str, ...]:
        """Names of the files at the top level, and of those in `additional_chat_templates`."""
        folder = "additional_chat_templates"
        return tuple(sorted(name for name in self._files if name.rpartition("/")[0] in ("", folder)))

    def manifest(self, names: tuple[str, ...]) -> Manifest:
        """Return the files' hashes: the hub's own, and of small files without one, computed. Raises DownloadFailed."""
        hashes = {name: self._file(name).sha256 for name in names}
        plain = tuple(name for name, digest in hashes.items() if digest is None)
        for name in plain:
            if (
                self._file(name).size_bytes > 64 << 20
            ):  # would be fetched to be hashed; the hub stores large ones in LFS
                raise UnsupportedCheckpoint(self.repository, f"the hub has no SHA-256 for {name}")
        paths = self.fetch(plain)
        return Manifest(files={name: digest or sha256_of(paths[name]) for name, digest in hashes.items()})

    def told(self, name: str) -> str | None:
        """Return the SHA-256 of a file in LFS."""
        return self._file(name).sha256

    def lacks(self, names: tuple[str, ...]) -> bool:
        """Whether one of these files is not in the cache."""
        return any(self._cached(name) is None for name in names)

    def size(self, names: tuple[str, ...]) -> int:
        """Return the files' bytes together, as the hub tells them."""
        return sum(self._file(name).size_bytes for name in names)

    def fetch(self, names: tuple[str, ...]) -> dict[str, Path]:
        """Download the files that are not in the cache, with progress bars; no half files.

        Raises DownloadFailed, and ModelNotFound for a gated repository: it shows to everybody what it has.
        """
        paths = {name: self._cached(name) for name in names}
        lacking = tuple(name for name, path in paths.items() if path is None)
        if lacking:
            self._drop_partial()
        self._check_room(lacking)
        return {name: path if path is not None else self._download(name) for name, path in paths.items()}

    def discard(self, name: str) -> None:
        """Delete a damaged download, so that the next attempt fetches it again."""
        link = self._cached(name)
        if link is not None:
            link.resolve().unlink(missing_ok=True)
            link.unlink(missing_ok=True)

    def _look_up(self, revision: str | None, known: Path) -> Listing:
        """Ask for a revision's commit and files; where the hub is away, return its last answer."""
        api = HfApi(endpoint=self._endpoint, token=self._token)
        try:
            info = api.model_info(self.repository, revision=revision, files_metadata=True, timeout=15.0)
        except HFValidationError:
            raise ModelNotFound(self.repository, "neither a directory nor a hub id such as org/name") from None
        except GatedRepoError:
            raise _gated(self.repository) from None
        except RevisionNotFoundError:
            raise ModelNotFound(self.repository, f"the repository has no revision {revision!r}") from None
        except RepositoryNotFoundError:
            why = "no such directory, and no such repository on the hub (or a private one: pass a token)"
            raise ModelNotFound(self.repository, why) from None
        except Exception as error:
            listing = _remembered(known)
            if listing is None:
                raise DownloadFailed(self.repository, f"the hub does not answer: {_reason(error)}") from error
            logger.warning("the hub does not answer; using its last answer about %s", self.repository)
            return listing
        try:
            listing = _listing_of(info)
        except ValidationError as error:
            why = f"the hub's answer is malformed: {error.errors()[0]['msg']}"
            raise DownloadFailed(self.repository, why) from None
        with contextlib.suppress(OSError):  # then a start without the hub is not possible
            known.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(known, listing.model_dump_json())
        return listing

    def _file(self, name: str) -> HubFile:
        if name not in self._files:
            raise UnsupportedCheckpoint(self.repository, f"{name} is missing")
        return self._files[name]

    def _cached(self, name: str) -> Path | None:
        found = try_to_load_from_cache(self.repository, name, cache_dir=self._cache_dir, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def _check_room(self, names: tuple[str, ...]) -> None:
        """Refuse a download that the disk, or the limit on it, has no room for. Raises DownloadFailed."""
        wanted = sum(self._file(name).size_bytes for name in names)
        if not wanted:
            return
        files = f"{len(names)} files of {self.repository}"
        if self._max_disk_bytes is not None:
            held = sum(file.size_bytes for name, file in self._files.items() if self._cached(name) is not None)
            if held + wanted > self._max_disk_bytes:
                why = f"{wanted:,} bytes and the {held:,} that are here exceed the limit of {self._max_disk_bytes:,}"
                raise DownloadFailed(files, why)
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache_dir).free
        if wanted + (64 << 20) > free:  # 64 MiB stay free on the disk
            raise DownloadFailed(files, f"{wanted:,} bytes are needed in {self._cache_dir}, {free:,} are free")

    def _drop_partial(self) -> None:
        """Delete what ended processes have left of their downloads: nothing goes on with it.

        A process that still downloads a file holds the library's lock for it.
        """
        folder = repo_folder_name(repo_id=self.repository, repo_type="model")
        for path in (self._cache_dir / folder / "blobs").glob("*.*.incomplete"):
            lock = self._cache_dir / ".locks" / folder / f"{path.name.partition('.')[0]}.lock"
            with contextlib.suppress(OSError):  # a lock that is held ends in a TimeoutError
                lock.parent.mkdir(parents=True, exist_ok=True)
                with WeakFileLock(lock, timeout=0.1):
                    path.unlink(missing_ok=True)

    def _download(self, name: str) -> Path:
        try:
            return Path(
                hf_hub_download(
                    self.repository,
                    name,
                    revision=self.commit,
                    cache_dir=self._cache_dir,
                    token=self._token,
                    endpoint=self._endpoint,
                )
            )
        except GatedRepoError:
            raise _gated(self.repository) from None
        except Exception as error:  # as in _look_up; the library has removed its partial file
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                why = f"the disk is full ({os.strerror(error.errno)} in {self._cache_dir})"
                raise DownloadFailed(f"{name} of {self.repository}", why) from error
            raise DownloadFailed(f"{name} of {self.repository}", _reason(error)) from error


def _remembered(path: Path) -> Listing | None:
    try:
        return Listing.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _gated(repository: str) -> ModelNotFound:
    return ModelNotFound(repository, "the hub gives it only to accounts with access; pass a token")


def _reason(error: Exception) -> str:
    """Describe an HTTP or system error in one line."""
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return f"HTTP status {error.response.status_code}"
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _listing_of(info: ModelInfo) -> Listing:
    """Return what the hub says of a revision. Raises ValidationError."""
    files = {
        item.rfilename: HubFile(size_bytes=item.size or 0, sha256=item.lfs.sha256 if item.lfs is not None else None)
        for item in info.siblings or ()
    }
    return Listing(commit=info.sha or "main", files=files)
