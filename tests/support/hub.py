"""A stand-in for the model hub, on this machine: the hub's protocol over HTTP, a request log, and faults on demand.

    with Hub() as hub:
        hub.add("org/tiny", directory)
        path = snapshot_download("org/tiny", endpoint=hub.url)          # in this process
        subprocess.run([...], env={**os.environ, **hub.environment(home)})   # in another one
        assert hub.files_fetched("org/tiny") == {"config.json", ...}

What it speaks: model info with file metadata, tree listings, paths-info, and `resolve` with ETags, commit hashes and
ranges, for public, private and gated repositories of several revisions. Large files carry the SHA-256 that the hub
keeps for LFS files; there is no Xet, so clients fall back to plain downloads. `huggingface_hub` reads HF_ENDPOINT when
it is imported: set it before that, or pass `endpoint=`.
"""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, Self, cast
from urllib.parse import parse_qs, unquote, urlsplit

Access = Literal["public", "private", "gated"]
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".model", ".onnx")
LFS_BYTES_MIN = 10 * 2**20  # a larger file is stored as LFS whatever it is called
POINTER_BYTES = 134  # what the hub gives as the size of an LFS pointer; nobody uses it
CHUNK_BYTES = 64 * 1024
IDLE_S = 60.0  # a connection that asks nothing for so long is closed
SETTLED_S = 2.0  # how long a look at the log waits for requests that are being answered


@dataclass(frozen=True, slots=True)
class Request:
    """One answered request: what was asked for, and how many bytes of body went out."""

    method: str
    path: str
    status: int
    bytes_sent: int
    repo: str | None = None
    file: str | None = None
    range: str | None = None
    authorized: bool = False


@dataclass(slots=True)
class Fault:
    """How one file misbehaves. `times` bounds how often; None is forever."""

    flip_at: int | None = None
    cut_at: int | None = None
    status: int | None = None
    bytes_per_s: float | None = None
    times: int | None = None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of one commit, with the hashes that the hub would publish."""

    content: bytes
    lfs: bool
    sha256: str
    blob_id: str  # git's object id, of the LFS pointer for an LFS file

    @classmethod
    def of(cls, name: str, content: bytes, *, lfs: bool = False) -> Self:
        """Hash a file as the hub does. lfs: whatever it is called."""
        lfs = lfs or name.endswith(LFS_SUFFIXES) or len(content) >= LFS_BYTES_MIN
        sha256 = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
        return cls(content, lfs, sha256, git_blob_id(pointer if lfs else content))

    @property
    def etag(self) -> str:
        """The ETag of a download: the SHA-256 of an LFS file, git's object id of any other."""
        return self.sha256 if self.lfs else self.blob_id


Commit = Mapping[str, StoredFile]


@dataclass(slots=True)
class Repo:
    """A repository: its commits by hash, its branches and tags by name."""

    access: Access = "public"
    token: str | None = None
    commits: dict[str, Commit] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)


class Hub:
    """The server. A context manager; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._repos: dict[str, Repo] = {}
        self._faults: dict[tuple[str, str], list[Fault]] = {}
        self._requests: list[Request] = []
        self._lock = threading.Lock()
        self._being_answered = 0
        self._answered = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler_for(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="hub", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()  # joins the connections' threads
        self._thread.join()

    @property
    def url(self) -> str:
        """What HF_ENDPOINT, or `endpoint=`, should be."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Variables for a child process whose only hub is this one, and whose hub cache is below `home`."""
        fresh = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return fresh | ({"HF_TOKEN": token} if token is not None else {})

    # What it holds ------------------------------------------------------------------------------------------------

    def add(
        self,
        repo: str,
        source: Path | Mapping[str, bytes],
        *,
        revision: str = "main",
        access: Access = "public",
        token: str | None = None,
        lfs: tuple[str, ...] = (),
    ) -> str:
        """Commit a directory's files, or these, and let `revision` point at them. Returns the commit's hash.

        lfs: names of files that are stored as LFS, beside those that always are.

        The source is read now: later changes to the directory are not served. Whoever shows `token` may read a
        private or gated repository.
        """
        contents = read_directory(source) if isinstance(source, Path) else source
        commit = {name: StoredFile.of(name, content, lfs=name in lfs) for name, content in sorted(contents.items())}
        listing = repo + "".join(f"{name}\0{file.blob_id}\n" for name, file in commit.items())
        sha = hashlib.sha1(listing.encode(), usedforsecurity=False).hexdigest()
        with self._lock:
            stored = self._repos.setdefault(repo, Repo())
            stored.access, stored.token = access, token
            stored.commits[sha] = commit
            stored.revisions[revision] = sha
        return sha

    # How it misbehaves --------------------------------------------------------------------------------------------

    def flip_byte(self, repo: str, file: str, at: int, *, times: int | None = None) -> None:
        """Serve the file with the byte at this offset inverted; its published hashes stay what they were."""
        self._add_fault(repo, file, Fault(flip_at=at, times=times))

    def cut(self, repo: str, file: str, after_bytes: int, *, times: int | None = None) -> None:
        """Close the connection once so many bytes of an answer's body were sent."""
        self._add_fault(repo, file, Fault(cut_at=after_bytes, times=times))

    def slow_down(self, repo: str, file: str, bytes_per_s: float) -> None:
        """Send the file no faster than this."""
        self._add_fault(repo, file, Fault(bytes_per_s=bytes_per_s))

    def fail(self, repo: str, file: str, status: int, *, times: int | None = None) -> None:
        """Answer the file's downloads with an error status, such as 500 or 429."""
        self._add_fault(repo, file, Fault(status=status, times=times))

    def heal(self) -> None:
        """Behave again."""
        with self._lock:
            self._faults.clear()

    def _add_fault(self, repo: str, file: str, fault: Fault) -> None:
        with self._lock:
            self._faults.setdefault((repo, file), []).append(fault)

    def take_faults(self, repo: str, file: str) -> list[Fault]:
        """The faults that this download of the file is to have; each use counts."""
        with self._lock:
            faults = [fault for fault in self._faults.get((repo, file), []) if fault.times is None or fault.times > 0]
            for fault in faults:
                fault.times = None if fault.times is None else fault.times - 1
            return faults

    # What it saw --------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everything that was answered, in order of completion; a client has its answer before the log has it."""
        with self._answered:
            self._answered.wait_for(lambda: self._being_answered == 0, SETTLED_S)
            return tuple(self._requests)

    def files_fetched(self, repo: str) -> set[str]:
        """The files of which somebody has been sent at least one byte."""
        return {r.file for r in self.requests if r.repo == repo and r.file is not None and r.bytes_sent > 0}

    def bytes_sent(self, repo: str, file: str | None = None) -> int:
        """Bytes of the repository's files, or of this one, that went out."""
        return sum(
            r.bytes_sent for r in self.requests if r.repo == repo and r.file is not None and file in (None, r.file)
        )

    def forget_requests(self) -> None:
        """Start the log anew."""
        with self._lock:
            self._requests.clear()

    def begin(self) -> None:
        """A request has come in."""
        with self._lock:
            self._being_answered += 1

    def record(self, request: Request) -> None:
        """Log one answered request."""
        with self._answered:
            self._being_answered -= 1
            self._requests.append(request)
            self._answered.notify_all()

    # What it answers ----------------------------------------------------------------------------------------------

    def find(self, repo: str, token: str | None, *, content: bool) -> Repo:
        """Look a repository up on behalf of whoever shows this token. content: it is for a file, not for metadata."""
        with self._lock:
            stored = self._repos.get(repo)
        if stored is None:
            raise _Refusal(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
        if stored.access == "public" or token == stored.token is not None:
            return stored
        if stored.access == "private":
            status = HTTPStatus.UNAUTHORIZED if token is None else HTTPStatus.NOT_FOUND
            raise _Refusal(status, "RepoNotFound", "Repository not found")
        if content:  # a gated repository shows what it has to everybody
            status = HTTPStatus.UNAUTHORIZED if token is None else HTTPStatus.FORBIDDEN
            raise _Refusal(status, "GatedRepo", f"Access to model {repo} is restricted")
        return stored

    def find_commit(self, stored: Repo, revision: str) -> tuple[str, Commit]:
        """Resolve a branch, a tag or a commit's hash."""
        with self._lock:
            sha = stored.revisions.get(revision, revision)
            commit = stored.commits.get(sha)
        if commit is None:
            raise _Refusal(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, commit

    def wait(self, seconds: float) -> None:
        """Sleep, but not beyond the hub's end."""
        self._closing.wait(seconds)


class _Refusal(Exception):
    """An error answer, as the hub words it."""

    def __init__(self, status: HTTPStatus, code: str, message: str, commit: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.commit = status, code, message, commit


class _Server(ThreadingHTTPServer):
    """Keeps its connections, so that the end of the hub ends those that clients hold open."""

    daemon_threads = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: object, client_address: object) -> None:
        self._connections.add(cast(socket.socket, request))
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def shutdown_request(self, request: object) -> None:
        self._connections.discard(cast(socket.socket, request))
        super().shutdown_request(request)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error of ours."""

    def close_connections(self) -> None:
        for connection in tuple(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed meanwhile


def _handler_for(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    return Handler


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_S

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are recorded, not printed."""

    # Routes -------------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        self._status, self._sent = 0, 0
        self._repo: str | None = None
        self._file: str | None = None
        self.hub.begin()
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._route([unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")], body)
        except _Refusal as refusal:
            self._refuse(refusal)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            self.hub.record(
                Request(
                    method=self.command,
                    path=self.path,
                    status=self._status,
                    bytes_sent=self._sent,
                    repo=self._repo,
                    file=self._file,
                    range=self.headers.get("Range"),
                    authorized=self._token() is not None,
                )
            )

    def _route(self, parts: list[str], body: bytes) -> None:
        match parts:
            case ["api", "models", org, name]:
                self._model_info(f"{org}/{name}", "main")
            case ["api", "models", org, name, "revision", revision]:
                self._model_info(f"{org}/{name}", revision)
            case ["api", "models", org, name, "tree", revision, *folder]:
                self._tree(f"{org}/{name}", revision, "/".join(folder))
            case ["api", "models", org, name, "paths-info", revision]:
                self._paths_info(f"{org}/{name}", revision, body)
            case [org, name, "resolve", revision, *path] if path:
                self._resolve(f"{org}/{name}", revision, "/".join(path))
            case _:
                raise _Refusal(
                    HTTPStatus.NOT_FOUND, "EntryNotFound", "Sorry, we can't find the page you are looking for."
                )

    def _model_info(self, repo: str, revision: str) -> None:
        self._repo = repo
        stored = self.hub.find(repo, self._token(), content=False)
        sha, commit = self.hub.find_commit(stored, revision)
        blobs = self._query("blobs")
        self._send_json(
            {
                "_id": sha[:24],
                "id": repo,
                "modelId": repo,
                "author": repo.partition("/")[0],
                "sha": sha,
                "lastModified": "2026-01-01T00:00:00.000Z",
                "createdAt": "2026-01-01T00:00:00.000Z",
                "private": stored.access == "private",
                "gated": "auto" if stored.access == "gated" else False,
                "disabled": False,
                "tags": ["transformers", "safetensors"],
                "downloads": 0,
                "likes": 0,
                "siblings": [_sibling(name, file, blobs=blobs) for name, file in commit.items()],
            }
        )

    def _tree(self, repo: str, revision: str, folder: str) -> None:
        self._repo = repo
        sha, commit = self.hub.find_commit(self.hub.find(repo, self._token(), content=False), revision)
        entries = list(_tree_entries(commit, folder, recursive=self._query("recursive")))
        if folder and not entries:
            raise _Refusal(HTTPStatus.NOT_FOUND, "EntryNotFound", f"{folder} does not exist", sha)
        self._send_json(entries)

    def _paths_info(self, repo: str, revision: str, body: bytes) -> None:
        self._repo = repo
        _, commit = self.hub.find_commit(self.hub.find(repo, self._token(), content=False), revision)
        if "json" in self.headers.get("Content-Type", ""):
            paths = json.loads(body)["paths"]
        else:
            paths = parse_qs(body.decode()).get("paths", [])
        self._send_json([_tree_file(path, commit[path]) for path in paths if path in commit])

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        self._repo, self._file = repo, name
        sha, commit = self.hub.find_commit(self.hub.find(repo, self._token(), content=True), revision)
        if name not in commit:
            raise _Refusal(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found", sha)
        file = commit[name]
        faults = [] if self.command == "HEAD" else self.hub.take_faults(repo, name)
        for fault in faults:
            if fault.status is not None:
                raise _Refusal(HTTPStatus(fault.status), "ServerError", "told to fail", sha)
        self._send_file(sha, file, faults)

    # Answers ------------------------------------------------------------------------------------------------------

    def _send_file(self, sha: str, file: StoredFile, faults: list[Fault]) -> None:
        size = len(file.content)
        headers = {
            "X-Repo-Commit": sha,
            "ETag": f'"{file.etag}"',
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if file.lfs:
            headers |= {"X-Linked-ETag": f'"{file.etag}"', "X-Linked-Size": str(size)}
        status, begin, end = HTTPStatus.OK, 0, size
        asked = self.headers.get("Range")
        if asked is not None:
            span = parse_range(asked, size)
            if span is None:
                self._start(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{size}"}, 0)
                return
            begin, end = span
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._start(status, headers, end - begin)
        if self.command != "HEAD":
            self._send_body(memoryview(damaged(file.content, faults))[begin:end], faults)

    def _send_body(self, body: memoryview, faults: list[Fault]) -> None:
        cut_at = min((fault.cut_at for fault in faults if fault.cut_at is not None), default=None)
        rate = min((fault.bytes_per_s for fault in faults if fault.bytes_per_s is not None), default=None)
        chunk = CHUNK_BYTES if rate is None else max(1, min(CHUNK_BYTES, int(rate / 20)))
        started = time.monotonic()
        for at in range(0, len(body), chunk):
            part = body[at : at + chunk] if cut_at is None else body[at : min(at + chunk, cut_at)]
            self.wfile.write(part)
            self._sent += len(part)
            if cut_at is not None and self._sent >= cut_at:
                self.close_connection = True
                return
            if rate is not None:
                self.hub.wait(started + self._sent / rate - time.monotonic())

    def _send_json(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self._start(HTTPStatus.OK, {"Content-Type": "application/json; charset=utf-8"}, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)
            self._sent += len(body)

    def _refuse(self, refusal: _Refusal) -> None:
        body = json.dumps({"error": refusal.message}).encode()
        headers = {
            "X-Error-Code": refusal.code,
            "X-Error-Message": refusal.message,
            "Content-Type": "application/json; charset=utf-8",
        }
        if refusal.commit is not None:
            headers["X-Repo-Commit"] = refusal.commit
        self._start(refusal.status, headers, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)  # not counted: nothing of the file

    def _start(self, status: HTTPStatus, headers: Mapping[str, str], length: int) -> None:
        self._status = int(status)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _token(self) -> str | None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if scheme == "Bearer" and token else None

    def _query(self, name: str) -> bool:
        return parse_qs(urlsplit(self.path).query).get(name, [""])[0].lower() in ("true", "1")


def read_directory(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path there."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def git_blob_id(content: bytes) -> str:
    """The object id that git gives to a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Read a Range header of one range, such as "bytes=0-99", "bytes=100-" or "bytes=-8", as [begin, end).

    Returns None where it cannot be satisfied.
    """
    unit, _, wanted = text.partition("=")
    first, dash, last = wanted.partition("-")
    if unit != "bytes" or not dash or not (first or last):
        return None
    if not first:
        return max(0, size - int(last)), size
    begin, end = int(first), min(size, int(last) + 1) if last else size
    return (begin, end) if begin < end else None


def damaged(content: bytes, faults: list[Fault]) -> bytes:
    """The content with the faults' bytes inverted."""
    flips = [fault.flip_at for fault in faults if fault.flip_at is not None]
    if not flips:
        return content
    changed = bytearray(content)
    for at in flips:
        changed[at] ^= 0xFF
    return bytes(changed)


def _sibling(name: str, file: StoredFile, *, blobs: bool) -> dict[str, object]:
    if not blobs:
        return {"rfilename": name}
    plain: dict[str, object] = {"rfilename": name, "size": len(file.content), "blobId": file.blob_id}
    lfs = {"sha256": file.sha256, "size": len(file.content), "pointerSize": POINTER_BYTES}
    return plain | ({"lfs": lfs} if file.lfs else {})


def _tree_file(path: str, file: StoredFile) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "oid": file.blob_id, "size": len(file.content), "path": path}
    lfs = {"oid": file.sha256, "size": len(file.content), "pointerSize": POINTER_BYTES}
    return entry | ({"lfs": lfs} if file.lfs else {})


def _tree_entries(commit: Commit, folder: str, *, recursive: bool) -> Iterator[dict[str, object]]:
    prefix = f"{folder}/" if folder else ""
    folders: set[str] = set()
    for path, file in commit.items():
        if not path.startswith(prefix):
            continue
        inner = path[len(prefix) :].split("/")[:-1]
        for depth in range(1, (len(inner) if recursive else min(1, len(inner))) + 1):
            name = prefix + "/".join(inner[:depth])
            if name not in folders:
                folders.add(name)
                yield {"type": "directory", "oid": git_blob_id(name.encode()), "size": 0, "path": name}
        if recursive or not inner:
            yield _tree_file(path, file)
