"""The stand-in for the hub speaks what `huggingface_hub` and `transformers` expect, and misbehaves when told to."""

import hashlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.hub import Hub, parse_range

REPO = "org/tiny"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of random weights in several shards."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
    )
    directory = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="60KB")
    (directory / "notes").mkdir()
    (directory / "notes" / "training.md").write_text("trained on nothing")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    with Hub() as hub:
        hub.add(REPO, checkpoint)
        yield hub


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


def test_a_snapshot_is_the_directory_that_was_added(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    path = Path(snapshot_download(REPO, endpoint=hub.url, cache_dir=tmp_path))
    names = {p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file()}
    assert {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} == names
    assert all((path / name).read_bytes() == (checkpoint / name).read_bytes() for name in names)
    assert hub.files_fetched(REPO) == names
    assert hub.bytes_sent(REPO) == sum((checkpoint / name).stat().st_size for name in names)


def test_only_the_files_that_were_asked_for_are_in_the_log(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    wanted = shards(checkpoint)[1]
    path = hf_hub_download(REPO, wanted.name, endpoint=hub.url, cache_dir=tmp_path)
    assert load_file(path).keys() == load_file(wanted).keys()
    assert hub.files_fetched(REPO) == {wanted.name}
    assert hub.bytes_sent(REPO, wanted.name) == wanted.stat().st_size
    hub.forget_requests()
    hf_hub_download(REPO, wanted.name, endpoint=hub.url, cache_dir=tmp_path)
    assert hub.files_fetched(REPO) == set()  # it was in the cache


def test_metadata_give_the_size_and_the_sha256_of_every_weight_file(hub: Hub, checkpoint: Path) -> None:
    api = HfApi(endpoint=hub.url)
    info = api.model_info(REPO, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    listed = {entry.path: entry for entry in api.list_repo_tree(REPO, recursive=True)}
    asked = api.get_paths_info(REPO, [path.name for path in shards(checkpoint)])
    for path, by_path in zip(shards(checkpoint), asked, strict=True):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        assert siblings[path.name].lfs.sha256 == listed[path.name].lfs.sha256 == by_path.lfs.sha256 == sha256
        assert siblings[path.name].size == listed[path.name].size == path.stat().st_size
    assert siblings["config.json"].lfs is None
    assert {"notes", "notes/training.md"} <= set(listed)
    assert "notes/training.md" not in {entry.path for entry in api.list_repo_tree(REPO)}


@pytest.mark.long
@pytest.mark.real_time
def test_transformers_loads_a_model_in_a_process_whose_endpoint_it_is(hub: Hub, tmp_path: Path) -> None:
    code = (
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        f"assert AutoConfig.from_pretrained({REPO!r}).num_hidden_layers == 4\n"
        f"print(AutoModelForCausalLM.from_pretrained({REPO!r}).num_parameters())\n"
    )
    environment = {**os.environ, **hub.environment(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    assert {"config.json", "model.safetensors.index.json"} < hub.files_fetched(REPO)


def test_a_revision_is_a_branch_or_a_commit(hub: Hub, tmp_path: Path) -> None:
    first = hub.add("org/two", {"config.json": b"{}"})
    second = hub.add("org/two", {"config.json": b'{"a": 1}'})
    tagged = hub.add("org/two", {"config.json": b'{"a": 2}'}, revision="refs/pr/1")
    api = HfApi(endpoint=hub.url)
    assert api.model_info("org/two").sha == second
    assert api.model_info("org/two", revision="refs/pr/1").sha == tagged
    for revision, text in ((first, "{}"), ("main", '{"a": 1}'), ("refs/pr/1", '{"a": 2}')):
        path = hf_hub_download("org/two", "config.json", revision=revision, endpoint=hub.url, cache_dir=tmp_path)
        assert Path(path).read_text() == text
    with pytest.raises(RevisionNotFoundError):
        api.model_info("org/two", revision="nope")


def test_what_does_not_exist_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download(REPO, "nope.json", endpoint=hub.url, cache_dir=tmp_path)
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download(REPO, "config.json", revision="nope", endpoint=hub.url, cache_dir=tmp_path)
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download("org/nope", "config.json", endpoint=hub.url, cache_dir=tmp_path)
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url).model_info("org/nope")


def test_a_private_repository_needs_its_token(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/private", {"config.json": b"{}"}, access="private", token="hf_right")
    for token in (False, "hf_wrong"):
        with pytest.raises(RepositoryNotFoundError):
            hf_hub_download("org/private", "config.json", token=token, endpoint=hub.url, cache_dir=tmp_path)
    path = hf_hub_download("org/private", "config.json", token="hf_right", endpoint=hub.url, cache_dir=tmp_path)
    assert Path(path).read_text() == "{}"
    assert any(request.authorized and request.status == 200 for request in hub.requests)


def test_a_gated_repository_shows_its_metadata_but_not_its_files(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/gated", {"config.json": b"{}"}, access="gated", token="hf_right")
    assert HfApi(endpoint=hub.url).model_info("org/gated", token=False).gated == "auto"
    for token, status in ((False, 401), ("hf_wrong", 403)):
        with pytest.raises(GatedRepoError) as refused:
            hf_hub_download("org/gated", "config.json", token=token, endpoint=hub.url, cache_dir=tmp_path)
        assert refused.value.response.status_code == status
    assert hf_hub_download("org/gated", "config.json", token="hf_right", endpoint=hub.url, cache_dir=tmp_path)


def test_a_range_is_answered_with_that_range(hub: Hub, checkpoint: Path) -> None:
    shard = shards(checkpoint)[0]
    content = shard.read_bytes()
    url = hf_hub_url(REPO, shard.name, endpoint=hub.url)
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=8-99"})) as answer:
        assert answer.status == 206
        assert answer.headers["Content-Range"] == f"bytes 8-99/{len(content)}"
        assert answer.read() == content[8:100]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, headers={"Range": f"bytes={len(content)}-"}))
    refused.value.close()
    assert refused.value.code == 416
    assert sorted(request.bytes_sent for request in hub.requests) == [0, 92]  # noted once sent, each by a thread


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=4-", (4, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=4-400", (4, 10)),
        ("bytes=10-", None),
        ("bytes=-", None),
        ("lines=0-1", None),
    ],
)
def test_ranges_are_read_as_the_standard_says(text: str, span: tuple[int, int] | None) -> None:
    assert parse_range(text, 10) == span


def test_a_flipped_byte_keeps_the_published_hash(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    shard = shards(checkpoint)[0]
    hub.flip_byte(REPO, shard.name, 200)
    served = Path(hf_hub_download(REPO, shard.name, endpoint=hub.url, cache_dir=tmp_path)).read_bytes()
    differing = [i for i, (a, b) in enumerate(zip(served, shard.read_bytes(), strict=True)) if a != b]
    assert differing == [200]
    (entry,) = HfApi(endpoint=hub.url).get_paths_info(REPO, [shard.name])
    assert entry.lfs.sha256 == hashlib.sha256(shard.read_bytes()).hexdigest()


def test_a_download_that_was_cut_is_resumed_where_it_ended(
    hub: Hub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)  # the client keeps whole chunks, by default of 10 MB
    shard = shards(checkpoint)[0]
    hub.cut(REPO, shard.name, 1000, times=1)
    path = hf_hub_download(REPO, shard.name, endpoint=hub.url, cache_dir=tmp_path)
    assert Path(path).read_bytes() == shard.read_bytes()
    downloads = [request for request in hub.requests if request.method == "GET"]
    assert [request.bytes_sent for request in downloads] == [1000, shard.stat().st_size - 1000]
    assert downloads[1].range == "bytes=1000-"


def test_a_slow_file_takes_its_time_and_does_not_hold_up_the_end(checkpoint: Path) -> None:
    shard = shards(checkpoint)[0]
    with Hub() as hub:
        hub.add(REPO, checkpoint)
        hub.slow_down(REPO, shard.name, bytes_per_s=10_000)
        started = time.monotonic()
        answer = urllib.request.urlopen(hf_hub_url(REPO, shard.name, endpoint=hub.url))
        assert len(answer.read(5000)) == 5000
        assert time.monotonic() - started > 0.3
    assert time.monotonic() - started < 5
    answer.close()


def test_an_error_that_was_ordered_is_answered_so_many_times(hub: Hub) -> None:
    hub.fail(REPO, "config.json", 503, times=1)
    url = hf_hub_url(REPO, "config.json", endpoint=hub.url)
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(url)
    failed.value.close()
    assert failed.value.code == 503
    with urllib.request.urlopen(url) as answer:
        assert answer.status == 200


def test_a_hub_that_has_ended_cannot_be_reached(checkpoint: Path) -> None:
    with Hub() as hub:
        hub.add(REPO, checkpoint)
        url = hf_hub_url(REPO, "config.json", endpoint=hub.url)
        urllib.request.urlopen(url).close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)
