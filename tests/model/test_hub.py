"""A repository of the hub: only the needed files travel, and what arrives is what the hub says."""

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarm.blocks import Blocks
from swarm.errors import ChecksumMismatch, DownloadFailed, ModelNotFound, UnsupportedCheckpoint
from swarm.model import hub as hub_module
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.loading import load_ends, load_span
from tests.support.hub import Hub

FamilyDir = Callable[[str], Path]
REPOSITORY = "org/llama"


@pytest.fixture
def hub(family_dir: FamilyDir) -> Iterator[Hub]:
    with Hub() as hub:
        hub.add(REPOSITORY, family_dir("llama"))
        yield hub


@pytest.fixture
def open_from(hub: Hub, tmp_path: Path) -> Callable[..., Checkpoint]:
    def get(repository: str = REPOSITORY, **options: object) -> Checkpoint:
        return open_checkpoint(repository, cache_dir=tmp_path / "cache", endpoint=hub.url, **options)

    return get


def weights_of(checkpoint: Checkpoint, *prefixes: str) -> set[str]:
    return {file for name, file in checkpoint.index.weight_map.items() if name.startswith(prefixes)}


def half_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if "incomplete" in path.name]


def test_opening_fetches_no_weights_and_gives_the_root_of_a_local_copy(
    hub: Hub, open_from: Callable[..., Checkpoint], family_dir: FamilyDir
) -> None:
    checkpoint = open_from()
    assert hub.files_fetched(REPOSITORY) == {"config.json", "model.safetensors.index.json"}
    assert checkpoint.root == open_checkpoint(family_dir("llama")).root


def test_a_span_fetches_only_the_files_that_have_its_tensors(hub: Hub, open_from: Callable[..., Checkpoint]) -> None:
    checkpoint = open_from()
    hub.forget_requests()
    load_span(checkpoint, Blocks(2, 4))
    expected = weights_of(checkpoint, "model.layers.2.", "model.layers.3.")
    assert hub.files_fetched(REPOSITORY) == expected
    hub.forget_requests()
    load_span(checkpoint, Blocks(2, 4))
    assert hub.files_fetched(REPOSITORY) == set()


def test_the_client_fetches_only_embeddings_norm_and_head(hub: Hub, open_from: Callable[..., Checkpoint]) -> None:
    checkpoint = open_from()
    hub.forget_requests()
    load_ends(checkpoint)
    expected = weights_of(checkpoint, "model.embed_tokens", "model.norm", "lm_head")
    assert hub.files_fetched(REPOSITORY) - {"generation_config.json"} == expected


def test_a_byte_flipped_on_the_way_refuses_to_start_and_is_fetched_again(
    hub: Hub, open_from: Callable[..., Checkpoint]
) -> None:
    checkpoint = open_from()
    file = min(weights_of(checkpoint, "model.layers.2."))
    hub.flip_byte(REPOSITORY, file, -5)
    with pytest.raises(ChecksumMismatch):
        load_span(checkpoint, Blocks(2, 3))
    hub.heal()
    assert load_span(checkpoint, Blocks(2, 3)).blocks == Blocks(2, 3)


def test_a_config_that_is_not_the_listed_one_is_refused_and_fetched_again(
    hub: Hub, open_from: Callable[..., Checkpoint], family_dir: FamilyDir
) -> None:
    expected = open_checkpoint(family_dir("llama")).root
    hub.add(REPOSITORY, family_dir("llama"), lfs=("config.json",))
    config = (family_dir("llama") / "config.json").read_bytes()
    hub.flip_byte(REPOSITORY, "config.json", config.index(b"1e-06"))
    with pytest.raises(ChecksumMismatch, match=r"config\.json"):
        open_from(root=expected)
    hub.heal()
    assert open_from(root=expected).root == expected


def test_a_limit_on_disk_space_is_kept(hub: Hub, open_from: Callable[..., Checkpoint], tmp_path: Path) -> None:
    checkpoint = open_from(max_disk_bytes=100_000)
    hub.forget_requests()
    with pytest.raises(DownloadFailed, match="limit of 100,000"):
        load_span(checkpoint, Blocks(0, 6))
    assert hub.files_fetched(REPOSITORY) == set()
    assert load_span(open_from(max_disk_bytes=10_000_000), Blocks(0, 6))
    assert not half_files(tmp_path)


def test_a_disk_without_room_is_noticed_before_the_download(
    hub: Hub, open_from: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_from()
    hub.forget_requests()
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DownloadFailed, match="1,000 are free"):
        load_span(checkpoint, Blocks(0, 6))
    assert hub.files_fetched(REPOSITORY) == set()


def test_a_disk_that_fills_up_while_downloading_leaves_no_half_file(
    open_from: Callable[..., Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.file_download as library

    def fill_up(_url: str, file: object, **_: object) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint = open_from()
    monkeypatch.setattr(library, "http_get", fill_up)
    with pytest.raises(DownloadFailed, match="the disk is full"):
        load_span(checkpoint, Blocks(0, 2))
    assert not half_files(tmp_path)


def test_a_connection_that_breaks_is_a_failed_download(
    hub: Hub, open_from: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    checkpoint = open_from()
    hub.fail(REPOSITORY, min(weights_of(checkpoint, "model.layers.0.")), 404)
    with pytest.raises(DownloadFailed, match="could not download"):
        load_span(checkpoint, Blocks(0, 2))
    assert not half_files(tmp_path)


def test_what_an_ended_process_left_of_a_download_goes(
    hub: Hub, open_from: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    """Of this span's files and of others, of which it may be that no span here wants them any more."""
    checkpoint = open_from()
    (blobs,) = tmp_path.glob("cache/models--*/blobs")
    for file in checkpoint.weight_files:
        (blobs / f"{checkpoint.source.told(file)}.0123abcd.incomplete").write_bytes(b"half of it")
    load_span(checkpoint, Blocks(2, 3))
    assert not half_files(tmp_path)


def test_a_process_that_downloads_keeps_its_file(
    hub: Hub, open_from: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    """Two begin the same download: the second waits for the first, and both have the file."""
    checkpoint = open_from()
    file = min(weights_of(checkpoint, "model.layers.2."))
    hub.slow_down(REPOSITORY, file, 0.7 * checkpoint.source.size((file,)))
    with ThreadPoolExecutor(2) as processes:
        first = processes.submit(checkpoint.source.fetch, (file,))
        while not half_files(tmp_path):
            assert not first.done()
            time.sleep(0.01)
        (half,) = half_files(tmp_path)
        second = processes.submit(open_from().source.fetch, (file,))
        while half.exists():
            assert not second.done()
            time.sleep(0.01)
        assert first.result() == second.result()
    assert hub.bytes_sent(REPOSITORY, file) < 1.5 * checkpoint.source.size((file,))


def test_what_the_hub_does_not_have_is_not_found(hub: Hub, open_from: Callable[..., Checkpoint]) -> None:
    with pytest.raises(ModelNotFound, match="no such repository"):
        open_from("org/nothing")
    with pytest.raises(ModelNotFound, match="no revision 'v9'"):
        open_from(revision="v9")
    with pytest.raises(ModelNotFound, match="neither a directory nor a hub id"):
        open_from("a/b/c/d")
    hub.add("org/empty", {"README.md": b"nothing"})
    with pytest.raises(UnsupportedCheckpoint):
        open_from("org/empty")
    hub.add("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(UnsupportedCheckpoint, match="pickles"):
        open_from("org/pickled")


def test_revisions_and_tokens_are_used(hub: Hub, open_from: Callable[..., Checkpoint], family_dir: FamilyDir) -> None:
    hub.add(REPOSITORY, family_dir("qwen2"), revision="other", access="private", token="hf_secret")
    with pytest.raises(ModelNotFound):
        open_from()
    assert open_from(token="hf_secret").config.model_type == "llama"
    assert open_from(token="hf_secret", revision="other").config.model_type == "qwen2"


@pytest.mark.parametrize("token", [None, "hf_other"])
def test_a_gated_repository_asks_for_an_account_with_access(
    hub: Hub, open_from: Callable[..., Checkpoint], family_dir: FamilyDir, token: str | None
) -> None:
    """It shows its files' names to everybody, so that the first refusal is that of a download."""
    hub.add(REPOSITORY, family_dir("llama"), access="gated", token="hf_secret")
    with pytest.raises(ModelNotFound, match="only to accounts with access; pass a token"):
        open_from(token=token)
    assert open_from(token="hf_secret").config.model_type == "llama"


def test_a_server_starts_again_while_the_hub_is_away(
    hub: Hub, open_from: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_from()
    load_span(first, Blocks(2, 3))

    def away(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(hub_module.HfApi, "model_info", away)
    again = open_from()
    assert again.root == first.root
    assert load_span(again, Blocks(2, 3)).blocks == Blocks(2, 3)


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="the hub does not answer"):
        open_checkpoint("org/llama", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")


def test_a_mirrors_malformed_answer_is_told_as_such(
    open_from: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hub_module.HfApi.model_info

    def answer(*arguments: object, **options: object) -> object:
        info = real(*arguments, **options)
        for file in info.siblings:
            file.size = -1
        return info

    monkeypatch.setattr(hub_module.HfApi, "model_info", answer)
    with pytest.raises(DownloadFailed, match="the hub's answer is malformed"):
        open_from()
