"""Models come and go: loaded when asked for, unloaded by bytes, listed as the swarm announces them."""

import asyncio
import gc
import shutil
import weakref
from collections import namedtuple
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm import config as settings
from swarm.client.session.membership import joined
from swarm.compute.thread import ComputeThread
from swarm.dht.directory import ModelEntry
from swarm.errors import DownloadFailed, ModelNotFound, Unreachable, UnsupportedCheckpoint
from swarm.gateway import following as following_module
from swarm.gateway.answering import Model
from swarm.gateway.api.problems import Rejected
from swarm.gateway.following import Following, FollowingLimits, candidates, followed
from swarm.gateway.generation import Generation, Sampling, Token
from swarm.gateway.loading import ModelOptions
from swarm.gateway.models import Models, serving
from swarm.gateway.recorder import Recorder
from swarm.gateway.resident import leaving
from swarm.gateway.routes import RouteLimits
from swarm.gateway.serve import readiness
from swarm.identity import Identity
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import ends_bytes
from tests.support.hub import Hub
from tests.support.inprocess import NETWORK, inprocess
from tests.support.swarms import DEMO_CHECKPOINT

Held = namedtuple("Held", "n_bytes used running")
REPOSITORY = "org/llama"


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory):
    before, settings.CACHE_DIR = settings.CACHE_DIR, tmp_path_factory.mktemp("cache")
    yield
    settings.CACHE_DIR = before


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    """Three models with tokenizers; the swarm serves the first alone."""
    home = tmp_path_factory.mktemp("models")
    for name in ("llama", "second", "third"):
        shutil.copytree(checkpoint, home / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_CHECKPOINT / file, home / name / file)
    (home / "second" / "config.json").write_text((home / "second" / "config.json").read_text() + " ")  # another root
    return home


@asynccontextmanager
async def models_of(swarm, *paths, **options):
    @asynccontextmanager
    async def join():
        yield swarm.directory()

    compute = ComputeThread(asyncio.get_running_loop(), threads=1)
    options.setdefault("routes", RouteLimits(fresh_s=0.0))
    try:
        joining = joined(join, Identity.generate(), network=NETWORK)
        made = ModelOptions(dtype="float32", **options)
        async with joining as member, serving(Models(member, compute, made)) as models:
            for path in paths:
                await models.add(str(path))
            yield models
    finally:
        compute.stop()


# What leaves


def test_model_that_was_used_longest_ago_leaves_first():
    held = [Held(4, used, 0) for used in (3.0, 1.0, 2.0)]
    assert leaving(held, 4, 12) == [held[1]]
    assert leaving(held, 8, 12) == [held[1], held[2]]
    assert leaving(held, 0, 12) == []


def test_model_in_use_stays():
    held = [Held(4, 1.0, 1), Held(4, 2.0, 0)]
    assert leaving(held, 4, 8) == [held[1]]
    assert leaving([Held(4, 1.0, 1)] * 2, 4, 8) is None


@given(
    st.lists(st.builds(Held, st.integers(1, 9), st.floats(0, 9), st.integers(0, 1)), max_size=8),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_what_is_left_fits_and_no_running_model_leaves(held, needed, bytes_max):
    gone = leaving(held, needed, bytes_max)
    running = sum(each.n_bytes for each in held if each.running)
    assert (gone is None) == (running + needed > bytes_max)
    if gone is not None:
        assert not any(each.running for each in gone)
        assert sum(each.n_bytes for each in held) - sum(each.n_bytes for each in gone) + needed <= bytes_max


# In memory


async def got(models, name):
    """Return a model as a request gets it that is over then."""
    async with AsyncExitStack() as until:
        return await models.get(name, until)


async def test_model_is_loaded_once_for_all_that_wait(swarm, folders):
    async with models_of(swarm, folders / "llama") as models:
        assert models.loaded() == []
        one, other = await asyncio.gather(got(models, "llama"), got(models, "llama"))
        assert one is other
        assert [model.name for model in models.loaded()] == ["llama"]
        with pytest.raises(ModelNotFound):
            await got(models, "other")


async def test_memory_holds_as_many_models_as_are_allowed(swarm, folders):
    bytes_max = 2 * ends_bytes(open_checkpoint(folders / "llama"), torch.float32)
    paths = [folders / name for name in ("llama", "second", "third")]
    async with models_of(swarm, *paths, ends_bytes_max=bytes_max) as models:
        recorder = Recorder()
        models.watch(recorder)
        await got(models, "llama")
        await got(models, "second")
        await got(models, "llama")
        engine = (await got(models, "second")).backend.engine
        engine.cycle = [engine]
        second = weakref.ref(engine)
        del engine
        gc.freeze()  # as the next loading does
        await got(models, "llama")
        await got(models, "third")
        assert [model.name for model in models.loaded()] == ["llama", "third"]
        assert second() is None, "what a model held is free when the next one is loaded"
        assert b"swarm_gateway_models_loaded 2.0" in recorder.text()
        assert (await got(models, "second")).name == "second"  # it comes back


async def test_guesses_of_models_in_memory_are_counted(swarm, folders):
    async with models_of(swarm, folders / "llama", folders / "second") as models:
        recorder = Recorder()
        models.watch(recorder)
        for name, sent, kept in (("llama", 7, 5), ("second", 4, 2)):
            guessing = (await got(models, name)).backend.engine.guessing
            guessing.sent, guessing.kept = sent, kept
        figures = recorder.text().decode()
        assert "swarm_gateway_guesses_sent 11.0" in figures
        assert "swarm_gateway_guesses_kept 7.0" in figures


async def test_model_that_can_never_fit_is_told_to_the_request(swarm, folders):
    async with models_of(swarm, folders / "llama", ends_bytes_max=1000) as models:
        with pytest.raises(Rejected, match="--ends-memory") as refused:
            await got(models, "llama")
        assert refused.value.problem.status == 503


async def test_running_generation_keeps_its_model_and_then_lets_it_go(swarm, folders):
    bytes_max = ends_bytes(open_checkpoint(folders / "llama"), torch.float32)
    async with models_of(swarm, folders / "llama", folders / "second", ends_bytes_max=bytes_max) as models:
        backend = (await got(models, "llama")).backend
        generation = Generation(prompt=tuple(range(3, 40)), tokens_max=6, sampling=Sampling(temperature=0))
        async with aclosing(backend.generate(generation)) as emitted:
            await anext(emitted)
            with pytest.raises(Rejected, match="in use"):
                await got(models, "second")
            await models.drop("llama")
            tokens = [each async for each in emitted if isinstance(each, Token)]
        assert len(tokens) == 6
        assert len(backend.engine.conversations) == 0  # its session is closed, not kept
        await got(models, "second")


async def test_a_model_stays_from_the_request_for_it_to_the_end(swarm, folders):
    bytes_max = ends_bytes(open_checkpoint(folders / "llama"), torch.float32)
    paths = [folders / name for name in ("llama", "second", "third")]
    async with models_of(swarm, *paths, ends_bytes_max=bytes_max) as models, AsyncExitStack() as until:
        found = await asyncio.gather(*(models.get(path.name, until) for path in paths), return_exceptions=True)
        assert [type(each) for each in found] == [Model, Rejected, Rejected]
        await models.drop("llama")  # it takes memory as long as the request
        with pytest.raises(Rejected, match="in use"):
            await got(models, "second")
        await until.aclose()
        await got(models, "second")


async def test_failure_to_load_is_told_and_does_not_stick(swarm, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "llama")
    async with models_of(swarm, tmp_path / "llama") as models:
        for _ in range(2):
            with pytest.raises(UnsupportedCheckpoint, match="tokenizer"):
                await got(models, "llama")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_CHECKPOINT / file, tmp_path / "llama" / file)
        assert (await got(models, "llama")).name == "llama"


async def test_readiness_says_which_model_has_no_route_and_why(checkpoint, folders):
    with inprocess(checkpoint, "0:6") as swarm:
        async with models_of(swarm, folders / "llama", folders / "second") as models:
            routes = await models.routes()
            assert routes["llama"] == ""
            assert "no server has them" in routes["second"]
            assert not (await readiness(models, None, all_needed=True)).is_ready
            assert (await readiness(models, None, all_needed=False)).is_ready
            await models.drop("second")
            assert (await readiness(models, None, all_needed=True)).is_ready


# As the swarm announces them


class Announced:
    """A directory that lists what a test says."""

    def __init__(self, *entries):
        self.entries = entries
        self.error = None

    async def models(self):
        if self.error is not None:
            raise self.error
        return self.entries


class Listed:
    """The list of models, without any memory."""

    def __init__(self):
        self.checkpoints, self.without_route = {}, set()

    @property
    def names(self):
        return list(self.checkpoints)

    async def put(self, checkpoint):
        self.checkpoints[checkpoint.public_name] = checkpoint

    async def drop(self, name):
        del self.checkpoints[name]

    async def routes(self):
        return {name: "no route" if name in self.without_route else "" for name in self.names}

    def arrange(self, names):
        self.checkpoints = {name: self.checkpoints[name] for name in names}


Opened = namedtuple("Opened", "public_name root")


@pytest.fixture
def disk(monkeypatch):
    """Roots of the models on this disk by name; `opened` are the names that were opened, with whether to download."""
    disk = {"org/a": "a" * 64, "org/b": "b" * 64}
    opened = []

    def open_here(name, options, *, may_download):
        opened.append((name, may_download))
        if name not in disk and not may_download:
            raise UnsupportedCheckpoint(name, "not here")
        return Opened(name, disk.get(name, "d" * 64))

    monkeypatch.setattr(following_module, "is_cached", lambda name, options: name in disk)
    monkeypatch.setattr(following_module, "opened_here", open_here)
    return disk, opened


def entry(letter):
    return ModelEntry(f"org/{letter}", letter * 64, 6)


def following(directory, models, allowed=(), now=lambda: 0.0, **limits):
    return Following(directory, models, ModelOptions(), allowed, now, FollowingLimits(**limits))


async def test_models_appear_and_disappear_as_they_are_announced(disk):
    directory, models = Announced(entry("a")), Listed()
    follows = following(directory, models)
    await follows.refresh()
    assert models.names == ["org/a"]
    directory.entries = (entry("b"),)
    await follows.refresh()
    assert models.names == ["org/b"]


async def test_only_models_on_this_disk_or_the_list_are_opened(disk):
    models = Listed()
    await following(Announced(entry("a"), entry("c"), entry("d")), models, allowed=["org/d"]).refresh()
    assert models.names == ["org/a", "org/d"]
    assert disk[1] == [("org/a", False), ("org/d", True)]


async def test_same_name_with_another_root_is_not_the_model(disk):
    models = Listed()
    await following(Announced(ModelEntry("org/a", "f" * 64, 6)), models).refresh()
    assert models.names == []


async def test_strangers_record_of_another_root_delays_no_model(disk):
    directory, models = Announced(ModelEntry("org/a", "6" * 64, 6)), Listed()
    follows = following(directory, models)
    await follows.refresh()
    assert models.names == []
    directory.entries = (ModelEntry("org/a", "6" * 64, 6), entry("a"))
    await follows.refresh()
    assert models.names == ["org/a"]


async def test_models_with_a_route_are_listed_first(disk):
    models = Listed()
    models.without_route = {"org/a"}
    await following(Announced(entry("a"), entry("b")), models).refresh()
    assert models.names == ["org/b", "org/a"]


async def test_list_stays_while_the_directory_cannot_be_read(disk):
    directory, models = Announced(entry("a")), Listed()
    follows = following(directory, models)
    await follows.refresh()
    directory.error = Unreachable("the DHT", (), 20.0)
    await follows.refresh()
    assert models.names == ["org/a"]


async def test_model_that_failed_is_tried_again_later(disk):
    roots, opened = disk
    roots["org/a"] = "e" * 64
    models, times = Listed(), [0.0]
    follows = following(Announced(entry("a")), models, now=lambda: times[-1], retry_s=600.0)
    await follows.refresh()
    await follows.refresh()
    assert len(opened) == 1
    roots["org/a"] = "a" * 64
    times.append(601.0)
    await follows.refresh()
    assert models.names == ["org/a"]


@pytest.mark.virtual_clock
async def test_gateway_does_not_wait_long_for_its_first_list():
    class Silent:
        async def models(self):
            await asyncio.sleep(3600)

    began = asyncio.get_running_loop().time()
    async with followed(following(Silent(), Listed(), first_s=10.0)):
        assert asyncio.get_running_loop().time() - began == pytest.approx(10.0)


@pytest.mark.virtual_clock
async def test_list_is_read_every_minute_whatever_fails():
    class Broken:
        asked = 0

        async def models(self):
            self.asked += 1
            raise RuntimeError("a bug")

    directory = Broken()
    async with followed(following(directory, Listed(), every_s=60.0)):
        assert directory.asked == 1
        await asyncio.sleep(125)
    assert directory.asked == 3


async def test_list_has_a_bound(disk):
    models = Listed()
    await following(Announced(entry("a"), entry("b")), models, models_max=1).refresh()
    assert models.names == ["org/a"]


@pytest.mark.parametrize("name", ["../etc", "/etc/passwd", "org/..", "org/a/b", "a b", "", "-x", "org/a--b", "ü"])
def test_names_that_are_no_repositorys_are_left_out(name):
    assert candidates([ModelEntry(name, "a" * 64, 6)]) == {}


def test_all_announced_roots_of_a_name_are_candidates():
    entries = [ModelEntry("org/a", root * 64, 6) for root in "ab"]
    assert candidates(entries) == {"org/a": {"a" * 64, "b" * 64}}


def test_nothing_is_downloaded_that_is_not_allowed(folders, tmp_path, monkeypatch):
    with Hub() as hub:
        hub.add(REPOSITORY, folders / "llama")
        monkeypatch.setattr(following_module, "open_checkpoint", partial(open_checkpoint, endpoint=hub.url))
        options = ModelOptions(cache_dir=tmp_path / "cache")
        assert not following_module.is_cached(REPOSITORY, options)
        with pytest.raises(DownloadFailed, match="it is not here"):
            following_module.opened_here(REPOSITORY, options, may_download=False)
        assert hub.files_fetched(REPOSITORY) == set()
        opened = following_module.opened_here(REPOSITORY, options, may_download=True)
        assert opened.root == open_checkpoint(folders / "llama").root
        monkeypatch.setattr(following_module, "is_cached", lambda *_: True)
        with pytest.raises(DownloadFailed, match="head are not here"):  # config and index came, weights did not
            following_module.opened_here(REPOSITORY, options, may_download=False)
