"""What a server does with what peers send it: over real channels, between real spans, without a DHT."""

import asyncio
import itertools
import socket
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from swarm import config as settings
from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.dht.records import Announcement, sign_announcement
from swarm.identity import Identity
from swarm.model import span as span_module
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.loading import load_span
from swarm.model.span import Span
from swarm.net.address import parse
from swarm.net.carriers.tcp import Listener, TcpCarrier, dial
from swarm.net.channel import Channel
from swarm.net.endpoint import Endpoint, Remote
from swarm.net.gate import IDLE, PROGRESS, Toll
from swarm.net.noise import ChannelKey
from swarm.protocol import journal as journal_module
from swarm.protocol.journal import Journal, JournalLimits, Past
from swarm.protocol.messages import (
    ROWS_MAX,
    AnyMessage,
    Close,
    Failed,
    Inquiry,
    Message,
    Open,
    Opened,
    Output,
    Progress,
    Rebuild,
    Rebuilt,
    Refused,
    Replay,
    Reroute,
    Rerouted,
    Step,
)
from swarm.protocol.naming import new_name
from swarm.protocol.tensors import meta_of
from swarm.server import handler as handler_module
from swarm.server import server as server_module
from swarm.server import session as session_module
from swarm.server.handler import SESSIONS_MAX, SESSIONS_SHARE
from swarm.server.hosting import NEXT_RECORD_LATE_S
from swarm.server.server import Server, ServerOptions
from swarm.server.session import WINDOW_STEPS, Declined
from tests.model.rings import save_family

NETWORK = "test"
HIDDEN = 64
POOL_TOKENS = 200
WITHIN_S = 10.0
TOLERANCE = 1e-4  # float32; for one product over all positions against several over parts of them
FIRST, SECOND = Blocks(0, 3), Blocks(3, 6)
_names = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint and two spans of it, loaded once."""

    checkpoint: Checkpoint
    spans: dict[Blocks, Span]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    threads, cache_dir = torch.get_num_threads(), settings.CACHE_DIR
    torch.set_num_threads(1)
    settings.CACHE_DIR = tmp_path_factory.mktemp("cache")
    checkpoint = open_checkpoint(save_family("llama", tmp_path_factory.mktemp("llama")))
    yield Loaded(checkpoint, {blocks: load_span(checkpoint, blocks) for blocks in (FIRST, SECOND)})
    torch.set_num_threads(threads)
    settings.CACHE_DIR = cache_dir


@dataclass(slots=True)
class Site:
    """A server in this process."""

    server: Server
    identity: Identity
    computed: list[int] = field(default_factory=list)  # tokens of every step that its span has run

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    @property
    def idle(self) -> bool:
        """Whether nothing of any session is left."""
        handler = self.server.handler
        pools = (self.server.pool, handler.windows, handler.inputs, handler.outputs, handler.journals)
        return not handler.sessions and not any(pool.used for pool in pools)

    def record(self, *, signer: Identity | None = None, **changes: object) -> str:
        """The server's announcement, as clients pass it on."""
        now = time.time()
        announcement = self.server.announcement("online").model_copy(update={"issued": now, "expires": now + 60})
        return packed(announcement.model_copy(update=changes), signer or self.identity)


@asynccontextmanager
async def serving(loaded: Loaded, blocks: Blocks, pool_tokens: int = POOL_TOKENS) -> AsyncIterator[Site]:
    identity = Identity.generate()
    me = Endpoint(identity, ChannelKey(), NETWORK)
    server = Server(
        loaded.checkpoint, loaded.spans[blocks], me, Listener(me, "127.0.0.1", 0), ServerOptions(pool_tokens)
    )
    site = Site(server, identity)
    submit = server._executor.submit

    def counted(task, done):
        def computed(result):
            if result is not None:
                site.computed.append(1)
            done(result)

        submit(task, computed)

    server._executor.submit = counted
    await server.start()
    try:
        yield site
    finally:
        await server.stop()


def throttle(channel: Channel):
    """Let a channel have a debt, so that it is not read. Its own token bucket lends once, and the shared one too."""
    for _ in range(3):
        channel.charge_idle(1 << 40)
    assert channel.is_paused


@pytest.fixture
async def first(loaded: Loaded) -> AsyncIterator[Site]:
    async with serving(loaded, FIRST) as site:
        yield site


@pytest.fixture
async def second(loaded: Loaded) -> AsyncIterator[Site]:
    async with serving(loaded, SECOND) as site:
        yield site


class Peer:
    """Somebody with an identity who speaks to servers."""

    def __init__(self, identity: Identity | None = None):
        self.me = Endpoint(identity or Identity.generate(), ChannelKey(), NETWORK)
        self.inbox: asyncio.Queue[tuple[AnyMessage, tuple[Tensor | None, ...]]] = asyncio.Queue()
        self.channels: dict[str, Channel] = {}

    @property
    def peer(self) -> str:
        return self.me.identity.peer_id

    async def to(self, site: Site) -> Channel:
        """This peer's channel to a server."""
        if site.peer not in self.channels or self.channels[site.peer].closed:
            remote = Remote(site.peer, site.server.me.key.public)
            self.channels[site.peer] = await dial(parse(site.server.data_address), remote, self.me, self._received)
        return self.channels[site.peer]

    async def carrier_to(self, site: Site) -> TcpCarrier:
        """The carrier of a new channel to a server, for one that sends what it likes."""
        remote, address = Remote(site.peer, site.server.me.key.public), parse(site.server.data_address)
        carrier = TcpCarrier(lambda carrier: Channel(carrier, self.me, self._received, remote))
        await asyncio.get_running_loop().create_connection(lambda: carrier, address.host, address.port)
        assert carrier.channel is not None
        await carrier.channel.ready
        return carrier

    def _received(self, channel: Channel, message: AnyMessage, got: Activations | None) -> Toll:
        self.inbox.put_nowait((message, got))
        return PROGRESS

    async def ask(self, site: Site, message: Message, sent: Activations | None = None) -> AnyMessage:
        """Send a message and return the next that comes, from whomever."""
        (await self.to(site)).send(message, sent)
        return await self.next()

    async def next(self) -> AnyMessage:
        async with asyncio.timeout(WITHIN_S):
            return (await self.inbox.get())[0]

    async def output(self) -> Tensor:
        """Return the activations of the next message, which must be an output."""
        async with asyncio.timeout(WITHIN_S):
            message, got = await self.inbox.get()
        assert isinstance(message, Output), message
        assert got is not None
        return got.hidden.clone()

    async def settled(self, site: Site) -> None:
        """Wait until the server has taken everything that was sent to it."""
        async with asyncio.timeout(WITHIN_S):
            await (await self.to(site)).ping()

    def leave(self) -> None:
        for channel in self.channels.values():
            channel.close()


@pytest.fixture
async def owner() -> AsyncIterator[Peer]:
    peer = Peer()
    yield peer
    peer.leave()


@pytest.fixture
async def stranger() -> AsyncIterator[Peer]:
    peer = Peer()
    yield peer
    peer.leave()


# Sessions belong to whoever opened them -------------------------------------------------------------------------------


async def test_a_step_goes_from_hop_to_hop_and_comes_back_to_the_owner(
    loaded: Loaded, first: Site, second: Site, owner: Peer
):
    request = await opened_ring(owner, first, second)
    hidden = activations(1, 5)
    (await owner.to(first)).send(*step(request, 1, hidden, want=2))
    got = await owner.output()
    assert torch.equal(got, local(loaded, hidden)[:, -2:])
    assert owner.inbox.empty()


async def test_a_stranger_can_neither_push_into_a_session_nor_close_nor_open_it_again(
    loaded: Loaded, first: Site, owner: Peer, stranger: Peer
):
    request = await opened(owner, first)
    hidden = activations(1, 4)
    refused = await stranger.ask(first, *step(request, 1, hidden))
    assert code(refused) == "not_yours"
    (await stranger.to(first)).send(Close(session=request.session))
    await stranger.settled(first)
    assert code(await stranger.ask(first, request)) == "not_yours"
    assert code(await stranger.ask(first, request.model_copy(update={"epoch": 7}))) == "not_yours"
    assert list(first.server.handler.sessions) == [request.session]
    (await owner.to(first)).send(*step(request, 1, hidden, want=4))
    assert torch.equal(await owner.output(), span_output(loaded, FIRST, hidden))
    assert first.computed == [1]


async def test_steps_that_are_refused_in_turns_are_not_free(first: Site, owner: Peer):
    """Those that were on their way behind a refused one are, once each; two numbers in turns had been for ever."""
    request = await opened(owner, first)
    session, now = first.server.handler.sessions[request.session], asyncio.get_running_loop().time()
    busy = Declined("busy", "what was sent before is not read", 1.0)
    excused = [session.excuses(number, busy, now) for _ in range(100) for number in (1, 2, 3)]
    assert excused == [True] * 3 + [False] * 297
    assert session.excuses(1, busy, now + 1.0)  # it was waited with


async def test_whoever_takes_a_sessions_name_gives_way_to_whose_it_is(first: Site, owner: Peer, stranger: Peer):
    """Hops know the name: one could take it at all servers that might replace it, and then vanish."""
    name = new_name(owner.peer)
    squats = await opened(stranger, first, session=name)
    (await stranger.to(first)).send(*step(squats, 1, activations(1, 4)))
    await stranger.output()
    assert isinstance(await owner.ask(first, open_for(first, session=name)), Opened)
    failed = await stranger.next()
    assert isinstance(failed, Failed)
    assert "another peer's" in failed.why
    assert code(await stranger.ask(first, squats.model_copy(update={"epoch": 9}))) == "not_yours"
    (await owner.to(first)).send(*step(squats, 1, activations(1, 4)))
    await owner.output()
    assert first.server.handler.sessions[name].owner.peer == owner.peer


async def test_a_second_channel_of_the_same_identity_does_not_control_the_sessions_of_the_first(
    first: Site, owner: Peer
):
    request = await opened(owner, first)
    again = Peer(owner.me.identity)
    (await again.to(first)).send(Close(session=request.session))
    await again.settled(first)
    assert list(first.server.handler.sessions) == [request.session]
    again.leave()


async def test_activations_count_from_the_named_previous_peer_only(
    loaded: Loaded, second: Site, owner: Peer, stranger: Peer
):
    previous = Peer()
    request = await opened(owner, second, previous=previous.peer, start=3, stop=6)
    hidden = activations(1, 3)
    for other in (owner, stranger):
        assert code(await other.ask(second, *step(request, 1, hidden))) == "not_yours"
    assert second.computed == []
    (await previous.to(second)).send(*step(request, 1, hidden, want=3))
    assert torch.equal(await owner.output(), span_output(loaded, SECOND, hidden))  # the owner gets what comes out
    assert previous.inbox.empty()
    (await previous.to(second)).send(Close(session=request.session))
    await previous.settled(second)
    assert list(second.server.handler.sessions) == [request.session]  # who sends activations controls nothing
    previous.leave()


async def test_a_step_of_another_epoch_is_rejected(first: Site, owner: Peer):
    request = await opened(owner, first, epoch=5)
    for epoch in (4, 6):
        stale = request.model_copy(update={"epoch": epoch})
        refused = await owner.ask(first, *step(stale, 1, activations(1, 2)))
        assert code(refused) == "not_yours"
        assert "epoch" in refused.why
    assert first.computed == []
    (await owner.to(first)).send(*step(request, 1, activations(1, 2)))
    await owner.output()


async def test_a_step_for_no_session_says_so(first: Site, stranger: Peer):
    answer = await stranger.ask(first, *step(open_for(first), 1, activations(1, 2)))
    assert isinstance(answer, Failed)
    assert answer.why == "no such session"


async def test_a_stranger_cannot_fail_a_session_by_speaking_as_its_next_hop(
    loaded: Loaded, first: Site, second: Site, owner: Peer, stranger: Peer
):
    request = await opened_ring(owner, first, second)
    lie = Failed(session=request.session, epoch=0, step=1, blame="self", why="a lie")
    (await stranger.to(first)).send(lie)
    await stranger.settled(first)
    hidden = activations(1, 2)
    (await owner.to(first)).send(*step(request, 1, hidden, want=2))
    assert torch.equal(await owner.output(), local(loaded, hidden))


async def test_a_message_that_only_servers_send_ends_the_channel(first: Site, stranger: Peer):
    channel = await stranger.to(first)
    channel.send(Opened(session="0" * 32, epoch=0, window=1))
    async with asyncio.timeout(WITHIN_S):
        await channel.ended


# Opening --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"root": "ab" * 32},
        {"numeric_class": "bfloat16"},
        {"numeric_class": "float32+gptq"},
        {"start": 2, "stop": 4},
        {"start": 3, "stop": 6},
        {"start": 2, "stop": 1},
        {"start": 1, "stop": 1},
        {"start": 0, "stop": 4096},
    ],
    ids=str,
)
async def test_what_is_not_served_is_refused(first: Site, owner: Peer, changes: dict[str, object]):
    refused = await owner.ask(first, open_for(first).model_copy(update=changes))
    assert code(refused) == "not_served"
    assert first.idle


async def test_a_part_of_the_span_is_served(loaded: Loaded, first: Site, owner: Peer):
    request = await opened(owner, first, start=1, stop=2)
    hidden = activations(1, 4)
    (await owner.to(first)).send(*step(request, 1, hidden, want=4))
    with torch.inference_mode():
        expected = loaded.spans[FIRST].part(Blocks(1, 2)).forward(hidden, cache=None)
    assert torch.equal(await owner.output(), expected)


async def test_what_strangers_open_is_not_remembered_for_ever(
    loaded: Loaded, first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(span_module, "PARTS_MAX", 2)
    requests = [await opened(owner, first, start=a, stop=b) for a, b in ((0, 1), (0, 2), (1, 2), (1, 3), (0, 3))]
    assert len(first.server.span._parts) <= 3
    assert first.server.span.part(FIRST) is first.server.span
    hidden = activations(1, 4)
    (await owner.to(first)).send(*step(requests[0], 1, hidden, want=4))
    with torch.inference_mode():
        expected = loaded.spans[FIRST].part(Blocks(0, 1)).forward(hidden, cache=None)
    assert torch.equal(await owner.output(), expected)


async def test_a_span_that_cannot_be_measured_serves_all_the_same(first: Site, monkeypatch: pytest.MonkeyPatch):
    def broken(_: Span):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server_module, "measure_throughput", broken)
    await first.server.measure()
    assert first.server.announcement("online").decode_tps is None


async def test_activations_are_read_as_fast_as_the_span_needs_them(first: Site):
    await first.server.measure()
    assert first.server.throughput is not None
    needed = server_module.INFLOW_SHARE * first.server.throughput.prefill_tps * HIDDEN * 4
    assert first.server._listener.flow.read.per_s == max(server_module.INFLOW_LEAST, needed)


async def test_a_server_that_leaves_while_it_is_measured_is_not_told(first: Site, monkeypatch: pytest.MonkeyPatch):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    monkeypatch.setattr(server_module, "measure_throughput", lambda _: time.sleep(0.2))
    measuring = asyncio.create_task(first.server.measure())
    await asyncio.sleep(0.05)
    measuring.cancel()
    await asyncio.sleep(0.4)
    assert reported == []


def records_that_do_not_hold(first: Site, second: Site) -> dict[str, str]:
    """Of the hop behind `first`."""
    good = second.record()
    past = time.time() - NEXT_RECORD_LATE_S - 120
    return {
        "not base64": "#" + good,
        "a changed byte": good[:-8] + ("A" if good[-8] != "A" else "B") + good[-7:],
        "a changed signature": ("A" if good[0] != "A" else "B") + good[1:],
        "expired": second.record(issued=past, expires=past + 60),
        "from the future": second.record(issued=time.time() + 300, expires=time.time() + 330),
        "another network": second.record(network="other"),
        "another model": second.record(root="cd" * 32),
        "another numeric class": second.record(numeric_class="bfloat16"),
        "not adjacent": second.record(blocks=(4, 6)),
        "behind": first.record(),
        "another protocol": second.record(protocol=2),
        "empty": "",
    }


async def test_a_next_record_that_does_not_hold_is_refused(first: Site, second: Site, owner: Peer):
    for what, record in records_that_do_not_hold(first, second).items():
        refused = await owner.ask(first, open_for(first, next_record=record))
        assert code(refused) == "bad_request", what
        assert "next hop" in refused.why, what
    assert first.idle
    assert isinstance(await owner.ask(first, open_for(first, next_record=second.record())), Opened)


async def test_nor_is_it_taken_when_it_comes_by_a_reroute(first: Site, second: Site, owner: Peer):
    request = await opened(owner, first, next_record=second.record())
    for what, record in records_that_do_not_hold(first, second).items():
        refused = await owner.ask(first, Reroute(session=request.session, epoch=1, next_record=record))
        assert code(refused) == "bad_request", what
    assert first.server.handler.sessions[request.session].epoch == 0


async def test_a_route_may_be_older_than_the_records_that_it_was_planned_with(first: Site, second: Site, owner: Peer):
    past = time.time() - 3600
    old = second.record(issued=past, expires=past + 60)
    request = open_for(first, next_record=second.record())
    assert isinstance(await owner.ask(first, request), Opened)
    assert isinstance(
        await owner.ask(first, Reroute(session=request.session, epoch=request.epoch + 1, next_record=old)), Rerouted
    )


async def test_a_next_record_signed_by_somebody_else_is_refused(first: Site, second: Site, owner: Peer):
    forger = Identity.generate()
    honest = second.server.announcement("online")
    now = time.time()
    forged = honest.model_copy(update={"issued": now, "expires": now + 60, "public_key": forger.public_key.hex()})
    data = sign_announcement(forged, forger)
    pretended = data.replace(forger.public_key.hex().encode(), second.identity.public_key.hex().encode())
    refused = await owner.ask(first, open_for(first, next_record=b64encode(pretended).decode()))
    assert code(refused) == "bad_request"
    assert "signature" in refused.why


async def test_a_next_hop_that_does_not_answer_is_blamed_and_its_owner_decides(first: Site, second: Site, owner: Peer):
    record = second.record(addresses=("127.0.0.1:1",))
    request = open_for(first, next_record=record)
    failed = await owner.ask(first, request)
    assert isinstance(failed, Failed)
    assert failed.blame == "next"
    (await owner.to(first)).send(Close(session=request.session))
    await until(lambda: first.idle)


async def test_a_session_that_was_closed_while_its_next_hop_was_dialled_is_over(first: Site, second: Site, owner: Peer):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        request = open_for(first, next_record=second.record(addresses=(f"{host}:{port}",)))
        (await owner.to(first)).send(request)
        (await owner.to(first)).send(Close(session=request.session))
        await owner.settled(first)
        (dialling,) = first.server.handler._openings
    silent.close()  # the dial fails now
    async with asyncio.timeout(WITHIN_S):
        await dialling
    assert owner.inbox.empty()
    assert first.idle


async def test_a_draining_server_takes_no_new_sessions_and_serves_the_old_ones(first: Site, owner: Peer):
    request = await opened(owner, first)
    first.server.handler.draining = True
    assert code(await owner.ask(first, open_for(first))) == "draining"
    (await owner.to(first)).send(*step(request, 1, activations(1, 2)))
    await owner.output()


async def test_one_peer_opens_only_so_many_sessions_over_however_many_channels(
    first: Site, owner: Peer, stranger: Peer
):
    again = Peer(owner.me.identity)
    for number in range(SESSIONS_MAX // (SESSIONS_SHARE + 1)):
        request = open_for(first)
        assert isinstance(await (again if number % 2 else owner).ask(first, request), Opened)
    assert code(await owner.ask(first, open_for(first))) == "no_room"
    later = request.model_copy(update={"epoch": request.epoch + 1})
    assert isinstance(await owner.ask(first, later), Opened), "it takes the place of the one before it"
    assert code(await again.ask(first, open_for(first))) == "no_room"
    assert isinstance(await stranger.ask(first, open_for(first)), Opened)
    again.leave()


# Steps ----------------------------------------------------------------------------------------------------------------

BAD_STEPS: dict[str, tuple[dict[str, object], dict[str, Tensor]]] = {
    "activations of another width": ({}, {"hidden": torch.zeros(2, 3, HIDDEN + 1)}),
    "activations of whole numbers": ({}, {"hidden": torch.zeros(2, 3, HIDDEN, dtype=torch.int64)}),
    "activations of rank 2": ({}, {"hidden": torch.zeros(3, HIDDEN)}),
    "other rows than before": ({}, {"hidden": torch.zeros(3, 3, HIDDEN)}),
    "position ids of another length": ({}, {"positions": torch.zeros(2, 4, dtype=torch.int64)}),
    "position ids of another batch": ({}, {"positions": torch.zeros(3, 3, dtype=torch.int64)}),
    "position ids of another dtype": ({}, {"positions": torch.zeros(2, 3)}),
    "negative position ids": ({}, {"positions": torch.full((2, 3), -1, dtype=torch.int64)}),
    "position ids beyond the model's end": ({}, {"positions": torch.full((2, 3), 256, dtype=torch.int64)}),
    "a mask of another shape": ({}, {"mask": torch.ones(2, 4, dtype=torch.uint8)}),
    "a mask of another dtype": ({}, {"mask": torch.ones(2, 3, dtype=torch.int64)}),
    "too few rows gathered": ({"rows": (0,)}, {}),
    "rows that do not exist": ({"rows": (0, 2)}, {}),
    "no rows gathered": ({"rows": ()}, {}),
    "more kept than there is": ({"keep": 7}, {}),
    "a rollback beyond what was agreed": ({"keep": 3}, {}),
    "more wanted than sent": ({"want": 4}, {}),
    "longer than the session may get": ({}, {"hidden": torch.zeros(2, 60, HIDDEN)}),
    "a step out of order": ({"step": 3}, {}),
    "no time left": ({"budget_ms": 0}, {}),
}
CODES = {
    "activations of another width": "bad_activations",
    "activations of whole numbers": "bad_activations",
    "activations of rank 2": "bad_activations",
    "a step out of order": "out_of_order",
    "no time left": "too_late",
}


@pytest.mark.parametrize("what", BAD_STEPS)
async def test_a_malformed_step_is_refused_and_the_session_is_intact(
    loaded: Loaded, first: Site, owner: Peer, what: str
):
    request = await opened(owner, first, positions_max=50, rollback_max=2)
    before, after = activations(2, 6, seed=1), activations(2, 3, seed=2)
    (await owner.to(first)).send(*step(request, 1, before))
    await owner.output()
    used = first.server.pool.used

    changes, tensors = BAD_STEPS[what]
    bad = step(request, 2, **({"hidden": after} | tensors), **({"keep": 6, "want": 1} | changes))
    refused = await owner.ask(first, *bad)
    assert code(refused) == CODES.get(what, "bad_request")
    assert first.server.pool.used == used

    (await owner.to(first)).send(*step(request, 2, after, keep=6, want=3))
    expected = span_output(loaded, FIRST, torch.cat([before, after], dim=1))[:, -3:]
    assert (await owner.output() - expected).abs().max() < TOLERANCE
    assert first.computed == [1, 1]


async def test_a_step_of_too_many_bytes_is_refused_and_one_token_of_many_rows_is_not(first: Site, owner: Peer):
    request = await opened(owner, first)
    message, hidden = step(request, 1, activations(1024, 17))
    assert code(await owner.ask(first, message, hidden)) == "bad_request"
    message, hidden = step(request, 1, activations(ROWS_MAX + 1, 1))
    assert code(await owner.ask(first, message, hidden)) == "bad_request"
    message, hidden = step(request, 1, activations(100, 1))
    (await owner.to(first)).send(message, hidden)
    assert (await owner.output()).shape[0] == 100


async def test_a_repeated_step_is_answered_again_and_not_computed_again(first: Site, second: Site, owner: Peer):
    request = await opened_ring(owner, first, second)
    sent = [step(request, 1, activations(1, 4), want=4), step(request, 2, activations(1, 1, seed=2), keep=4)]
    outputs = []
    for message in sent:
        (await owner.to(first)).send(*message)
        outputs.append(await owner.output())
    computed = (len(first.computed), len(second.computed))
    for message, output in [*zip(sent, outputs, strict=True)] * 2:
        (await owner.to(first)).send(*message)
        assert torch.equal(await owner.output(), output)
    assert (len(first.computed), len(second.computed)) == computed == (2, 2)
    assert first.server.pool.used == 5


async def test_only_accepted_decode_steps_are_not_counted_as_bytes(first: Site, owner: Peer):
    request = await opened(owner, first)
    handler = first.server.handler
    channel = handler.sessions[request.session].owner
    one = activations(1, 1)
    for message, toll in (
        (step(request, 1, activations(1, 4)), PROGRESS),
        (step(request, 2, one, keep=4), Toll(free_bytes=one.nbytes)),
    ):
        assert handler.on_message(channel, *message) == toll
        await owner.output()
    assert handler.on_message(channel, *step(request, 3, activations(1, 1), keep=99)).free_bytes == 0
    assert code(await owner.next()) == "bad_request"


async def test_a_step_that_is_long_past_is_refused(first: Site, owner: Peer):
    request = await opened(owner, first)
    for number in range(1, WINDOW_STEPS + 2):
        (await owner.to(first)).send(*step(request, number, activations(1, 1), keep=number - 1))
        await owner.output()
    refused = await owner.ask(first, *step(request, 1, activations(1, 1)))
    assert code(refused) == "out_of_order"


async def test_rollbacks_and_gathers_give_what_a_fresh_run_gives(loaded: Loaded, first: Site, owner: Peer):
    request = await opened(owner, first, rollback_max=4)
    start, more, tail = activations(2, 6, seed=1), activations(2, 2, seed=2), activations(3, 2, seed=3)
    (await owner.to(first)).send(*step(request, 1, start))
    await owner.output()
    (await owner.to(first)).send(*step(request, 2, more, keep=6))
    await owner.output()
    (await owner.to(first)).send(*step(request, 3, tail, keep=5, rows=(1, 0, 1), want=2))
    expected = span_output(loaded, FIRST, torch.cat([start[[1, 0, 1], :5], tail], dim=1))[:, -2:]
    assert (await owner.output() - expected).abs().max() < TOLERANCE
    assert first.server.pool.used == 3 * 7


async def test_a_session_may_always_begin_again(first: Site, owner: Peer):
    request = await opened(owner, first, rollback_max=2)
    (await owner.to(first)).send(*step(request, 1, activations(1, 6)))
    await owner.output()
    (await owner.to(first)).send(*step(request, 2, activations(1, 4, seed=1), keep=0, want=4))
    again = await owner.output()
    fresh = await opened(owner, first)
    (await owner.to(first)).send(*step(fresh, 1, activations(1, 4, seed=1), want=4))
    assert torch.equal(again, await owner.output())


async def test_a_full_pool_refuses_the_step_unapplied_and_says_when_to_come_back(
    first: Site, owner: Peer, stranger: Peer
):
    holder = await opened(stranger, first)
    (await stranger.to(first)).send(*step(holder, 1, activations(1, 2)))
    await stranger.output()
    room = first.server.pool.free(owner.peer)
    request = await opened(owner, first, positions_max=POOL_TOKENS)
    refused = await owner.ask(first, *step(request, 1, activations(1, room + 1)))
    assert code(refused) == "no_room"
    assert refused.retry_after_ms > 0
    assert first.server.pool.used == 2
    (await owner.to(first)).send(*step(request, 1, activations(1, room)))
    await owner.output()


async def test_a_step_that_will_never_fit_is_not_asked_to_come_back(first: Site, owner: Peer):
    room = first.server.pool.most
    request = await opened(owner, first, positions_max=POOL_TOKENS)
    refused = await owner.ask(first, *step(request, 1, activations(1, room + 1)))
    assert (code(refused), refused.retry_after_ms) == ("no_room", None)


async def test_a_session_that_will_soon_find_no_room_is_refused_while_it_holds_none(
    first: Site, owner: Peer, stranger: Peer
):
    """Else several take their room piece by piece, until each waits for what another one holds."""
    room = first.server.pool.most
    request = await opened(owner, first, positions_soon=room - 8)
    refused = await owner.ask(first, open_for(first, positions_soon=room - 8))
    assert (code(refused), refused.retry_after_ms > 0) == ("no_room", True)
    await opened(owner, first, positions_soon=8)
    other = await opened(stranger, first, positions_soon=room)  # nothing is set aside for anybody
    (await owner.to(first)).send(*step(request, 1, activations(1, 4)))
    await owner.output()
    assert code(await stranger.ask(first, open_for(first, positions_soon=room))) == "no_room"
    (await stranger.to(first)).send(Close(session=other.session))
    await stranger.settled(first)
    assert code(await stranger.ask(first, open_for(first, positions_soon=room))) == "no_room"  # 4 are somebody else's
    await opened(stranger, first, positions_soon=4)


async def test_a_session_that_is_opened_anew_needs_no_second_room(first: Site, owner: Peer, stranger: Peer):
    """As after a connection that this side does not know to be dead."""
    await opened(stranger, first)
    (await stranger.to(first)).send(*step(await opened(stranger, first), 1, activations(1, 1)))
    await stranger.output()
    tokens = first.server.pool.free(owner.peer)
    request = await opened(owner, first, positions_soon=tokens, positions_max=tokens)
    (await owner.to(first)).send(*step(request, 1, activations(1, tokens)))
    await owner.output()
    assert isinstance(await owner.ask(first, request.model_copy(update={"epoch": 1})), Opened)


async def test_what_waits_for_room_is_charged_to_nobody_unless_it_is_sent_again_at_once(
    first: Site, owner: Peer, stranger: Peer
):
    holder = await opened(stranger, first)
    (await stranger.to(first)).send(*step(holder, 1, activations(1, 2)))
    await stranger.output()
    request = await opened(owner, first, positions_max=POOL_TOKENS)
    await owner.settled(first)
    charged: list[int] = []
    session = first.server.handler.sessions[request.session]
    session.owner.charge_idle = charged.append  # type: ignore[method-assign]
    tokens = first.server.pool.free(owner.peer) + 1
    channel = await owner.to(first)
    first_step = step(request, 1, activations(1, tokens))
    channel.send(*first_step)
    for number in range(2, 1 + WINDOW_STEPS):  # they were on their way
        channel.send(*step(request, number, activations(1, 1), keep=tokens))
    for _ in range(WINDOW_STEPS):
        assert code(await owner.next()) in {"no_room", "out_of_order"}
    assert charged == []
    assert code(await owner.ask(first, *step(request, 2, activations(1, 1), keep=tokens))) == "out_of_order"
    assert len(charged) == 1  # once is enough
    assert code(await owner.ask(first, *first_step)) == "no_room"
    assert len(charged) == 2  # it was asked to wait
    session._refused = replace(session._refused, again_at=0.0)
    assert code(await owner.ask(first, *first_step)) == "no_room"
    assert len(charged) == 2


async def test_a_step_refused_further_on_is_sent_again_and_computed_once_by_each_hop(
    loaded: Loaded, first: Site, owner: Peer, stranger: Peer
):
    async with serving(loaded, SECOND, pool_tokens=10) as second:
        holder = await opened(stranger, second, start=3, stop=6)
        (await stranger.to(second)).send(*step(holder, 1, activations(1, 8)))
        await stranger.output()
        request = await opened_ring(owner, first, second)
        hidden = activations(1, 5)
        message = step(request, 1, hidden, want=5)
        assert code(await owner.ask(first, *message)) == "no_room"
        (await stranger.to(second)).send(Close(session=holder.session))
        await stranger.settled(second)
        (await owner.to(first)).send(*message)
        assert torch.equal(await owner.output(), local(loaded, hidden))
        assert (len(first.computed), len(second.computed)) == (1, 2)


async def test_more_steps_under_way_than_the_window_are_refused(first: Site, owner: Peer):
    request = await opened(owner, first)
    channel = await owner.to(first)
    release = held_up(first)
    for number in range(1, WINDOW_STEPS + 2):
        channel.send(*step(request, number, activations(1, 1), keep=number - 1))
    assert code(await owner.next()) == "bad_request"
    release.set()
    for _ in range(WINDOW_STEPS):
        await owner.output()


async def test_steps_that_a_reset_made_pointless_fill_no_window(loaded: Loaded, first: Site, owner: Peer):
    """A hop may be given a new past twice in a row, when others fail while the steps are sent again."""
    request = await opened(owner, first)
    channel = await owner.to(first)
    release = held_up(first)
    for number in range(1, WINDOW_STEPS + 1):
        channel.send(*step(request, number, activations(1, 1), keep=number - 1))
    again = Reroute(session=request.session, epoch=1, reset=True, after_step=3)
    assert isinstance(await owner.ask(first, again), Rerouted)
    past = activations(1, 6)
    channel.send(rebuild(request, 0, 6, past).model_copy(update={"epoch": 1}), Activations(past))
    for number in range(4, 4 + WINDOW_STEPS):
        message, hidden = step(request, number, activations(1, 1), keep=2 + number)
        channel.send(message.model_copy(update={"epoch": 1}), hidden)
    await owner.settled(first)
    progress = await owner.ask(first, Inquiry(session=request.session, epoch=1))
    assert isinstance(progress, Progress)
    assert (progress.applied, progress.length, progress.under_way) == (3, 6 + WINDOW_STEPS, 1 + WINDOW_STEPS)
    release.set()
    assert isinstance(await owner.next(), Rebuilt)
    expected = span_output(loaded, FIRST, torch.cat([past, *[activations(1, 1)] * WINDOW_STEPS], dim=1))
    for position in range(6, 6 + WINDOW_STEPS):
        assert (await owner.output() - expected[:, position : position + 1]).abs().max() < TOLERANCE
    progress = await owner.ask(first, Inquiry(session=request.session, epoch=1))
    assert isinstance(progress, Progress)
    assert (progress.applied, progress.under_way) == (3 + WINDOW_STEPS, 0)


async def test_a_hop_before_this_one_that_is_not_read_is_not_called_quiet(first: Site, owner: Peer, stranger: Peer):
    """Else what waits to be read is taken for lost, and the edge for blocked."""
    request = await opened(owner, first, previous=stranger.peer)
    (await stranger.to(first)).send(*step(request, 1, activations(1, 1), want=1))
    await owner.output()
    source = first.server.handler.sessions[request.session].source
    assert source is not None
    quiet_ms = []
    for is_read in (True, False):
        source.heard_at -= 60
        if not is_read:
            throttle(source)
        progress = await owner.ask(first, Inquiry(session=request.session, epoch=request.epoch))
        assert isinstance(progress, Progress)
        quiet_ms.append(progress.quiet_ms)
    assert quiet_ms[0] >= 60_000
    assert quiet_ms[1] == 0


async def test_cache_is_held_until_what_frees_it_has_been_computed(first: Site, owner: Peer):
    """Else steps that gather many rows wait, uncharged, behind others that took their charge back."""
    request = await opened(owner, first)
    channel = await owner.to(first)
    channel.send(*step(request, 1, activations(1, 20)))
    await owner.output()
    release = held_up(first)
    channel.send(*step(request, 2, activations(4, 1), keep=20, rows=(0,) * 4))
    channel.send(*step(request, 3, activations(1, 1), keep=0))
    await owner.settled(first)
    assert first.server.pool.used == 4 * 21
    channel.send(Close(session=request.session))
    await owner.settled(first)
    assert first.server.pool.used == 4 * 21, "its session has ended, the compute thread has not done with it"
    release.set()
    await until(lambda: first.idle)


async def test_a_rollback_that_has_been_computed_gives_cache_back(first: Site, owner: Peer):
    request = await opened(owner, first)
    for number, tokens in ((1, 20), (2, 3)):
        (await owner.to(first)).send(*step(request, number, activations(1, tokens), keep=0))
        await owner.output()
        assert first.server.pool.used == tokens


async def test_whoever_does_not_read_gets_no_step_again(first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch):
    """A few bytes would have as many megabytes written, and held for him, as he likes."""
    request = await opened(owner, first)
    message = step(request, 1, activations(1, 4))
    (await owner.to(first)).send(*message)
    await owner.output()
    monkeypatch.setattr(handler_module, "UNREAD_BYTES_MAX", -1)
    assert code(await owner.ask(first, *message)) == "busy"


async def test_a_next_hop_that_does_not_read_gets_no_more(
    first: Site, second: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    request = await opened_ring(owner, first, second)
    message = step(request, 1, activations(1, 4))
    (await owner.to(first)).send(*message)
    await owner.output()
    monkeypatch.setattr(handler_module, "NEXT_UNSENT_MAX", -1)
    for each in (message, step(request, 2, activations(1, 1), keep=4)):
        assert code(await owner.ask(first, *each)) == "busy"


async def test_who_sends_for_an_owner_that_is_not_read_already_pays_himself(first: Site, owner: Peer, stranger: Peer):
    """Else two who know each other send as much as they like, the one in the other's name."""
    request = await opened(owner, first, previous=stranger.peer)
    await stranger.to(first)
    await stranger.settled(first)
    session = first.server.handler.sessions[request.session]
    sender = next(channel for channel in first.server._listener.admission.channels if channel.peer == stranger.peer)
    assert session.payer(sender) is session.owner
    throttle(session.owner)
    assert session.payer(sender) is sender


async def test_positions_that_nobody_names_end_where_the_model_does(loaded: Loaded, owner: Peer):
    limit = loaded.spans[FIRST].traits.positions_max
    assert limit is not None
    async with serving(loaded, FIRST, pool_tokens=4 * limit) as site:
        request = await opened(owner, site, positions_max=2 * limit)
        refused = await owner.ask(site, *step(request, 1, activations(1, limit + 1), want=1))
        assert code(refused) == "bad_request"
        assert f"{limit + 1} positions" in refused.why


@pytest.mark.parametrize("kind", ["step", "past"])
async def test_what_comes_beside_activations_is_kept_without_their_frame(
    first: Site, second: Site, owner: Peer, kind: str
):
    request = open_for(first, next_record=second.record(), rebuild=kind == "past")
    assert isinstance(await owner.ask(first, request), Opened)
    session = first.server.handler.sessions[request.session]
    hidden, frame = activations(1, 4), torch.arange(1000)
    positions = frame[:4][None]
    message = step(request, 1, hidden)[0] if kind == "step" else rebuild(request, 0, 4, hidden)
    message = message.model_copy(update={"positions": meta_of(positions)})
    first.server.handler.on_message(session.owner, message, Activations(hidden, positions))
    await until(lambda: session.journal.n_bytes > 0)
    (past,) = session.journal.past_after(1)
    assert torch.equal(past.activations.positions, positions)
    assert past.activations.positions.untyped_storage().nbytes() == positions.nbytes


async def test_an_owner_who_relays_is_no_channel_that_was_dialled(
    first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    released: list[Channel] = []
    monkeypatch.setattr(first.server.handler.dialer, "release", released.append)
    request = await opened(owner, first, relay=True)
    (await owner.to(first)).send(Close(session=request.session))
    await until(lambda: first.idle)
    assert released == []


# Ends -----------------------------------------------------------------------------------------------------------------


async def test_a_closed_session_leaves_nothing(first: Site, second: Site, owner: Peer):
    request = await opened_ring(owner, first, second)
    (await owner.to(first)).send(*step(request, 1, activations(2, 5)))
    await owner.output()
    assert (first.server.pool.used, second.server.pool.used) == (10, 10)
    for site in (first, second):
        (await owner.to(site)).send(Close(session=request.session))
        await owner.settled(site)
        assert site.idle


async def test_sessions_end_with_their_owners_channel(first: Site, second: Site, owner: Peer, stranger: Peer):
    kept = await opened(stranger, first)
    request = await opened_ring(owner, first, second)
    (await owner.to(first)).send(*step(request, 1, activations(2, 5)))
    await owner.output()
    owner.leave()
    await until(lambda: second.idle and list(first.server.handler.sessions) == [kept.session])
    assert first.server.pool.used == 0


async def test_a_step_under_way_when_its_session_ends_is_dropped_and_leaves_nothing(first: Site, owner: Peer):
    for _ in range(5):
        request = await opened(owner, first)
        channel = await owner.to(first)
        for number in range(1, 5):
            channel.send(*step(request, number, activations(1, 4), keep=4 * (number - 1)))
        channel.send(Close(session=request.session))
        await until(lambda: first.idle and first.server.handler.steps_under_way == 0)


async def test_the_owner_learns_when_the_next_hop_goes_and_the_past_stays(loaded: Loaded, first: Site, owner: Peer):
    async with serving(loaded, SECOND) as second:
        request = await opened(owner, first, next_record=second.record())
    failed = await owner.next()
    assert isinstance(failed, Failed)
    assert (failed.session, failed.blame) == (request.session, "next")
    assert not first.idle  # a repair can go on from here
    (await owner.to(first)).send(Close(session=request.session))
    await until(lambda: first.idle)


async def test_a_server_that_stops_tells_the_owners_and_leaves_nothing(loaded: Loaded, owner: Peer):
    async with serving(loaded, FIRST) as site:
        request = await opened(owner, site)
    failed = await owner.next()
    assert isinstance(failed, Failed)
    assert (failed.session, failed.blame) == (request.session, "self")
    assert site.idle


# ----------------------------------------------------------------------------------------------------------------------


# Repair ---------------------------------------------------------------------------------------------------------------


async def test_a_stranger_can_neither_reroute_nor_replay_a_session(
    first: Site, second: Site, owner: Peer, stranger: Peer
):
    request = await opened_ring(owner, first, second)
    reroute = Reroute(session=request.session, epoch=5, previous=stranger.peer)
    assert code(await stranger.ask(first, reroute)) == "not_yours"
    replay = Replay(session=request.session, epoch=request.epoch, step=0, hops=1)
    assert code(await stranger.ask(first, replay)) == "not_yours"
    (await owner.to(first)).send(*step(request, 1, activations(1, 3)))
    await owner.output()  # the session is as it was


@pytest.mark.parametrize("epoch", [0, 1])
async def test_a_reroute_needs_a_later_epoch(first: Site, owner: Peer, epoch: int):
    request = await opened(owner, first, epoch=1)
    assert code(await owner.ask(first, Reroute(session=request.session, epoch=epoch))) == "not_yours"
    assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=2)), Rerouted)


async def test_after_a_reroute_the_old_epoch_and_the_old_neighbour_are_out(
    loaded: Loaded, first: Site, owner: Peer, stranger: Peer
):
    request = await opened(owner, first, previous=stranger.peer)
    (await stranger.to(first)).send(*step(request, 1, activations(1, 3)))
    await owner.output()
    assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=1)), Rerouted)
    late, hidden = step(request, 2, activations(1, 1), keep=3)
    assert code(await stranger.ask(first, late, hidden)) == "not_yours"
    assert code(await stranger.ask(first, late.model_copy(update={"epoch": 1}), hidden)) == "not_yours"
    (await owner.to(first)).send(late.model_copy(update={"epoch": 1}), hidden)
    expected = span_output(loaded, FIRST, torch.cat([activations(1, 3), activations(1, 1)], dim=1))[:, -1:]
    assert (await owner.output() - expected).abs().max() < TOLERANCE


# Grants: what the owner allows its hops' neighbours, field by field ---------------------------------------------------

OF_THE_GRANT = {"session", "epoch", "previous", "next_record", "relay", "lifetime_s", "tokens_max"}
OF_THE_SESSION = {"root", "numeric_class", "start", "stop", "positions_max", "rollback_max", "batch", "positions_soon"}
OF_THE_PAST = {"after_step", "rebuild", "reset"}


def test_every_field_that_opens_or_reroutes_is_one_that_is_tested_here():
    assert set(Open.model_fields) - {"kind"} == OF_THE_GRANT | OF_THE_SESSION | OF_THE_PAST - {"reset"}
    assert set(Reroute.model_fields) - {"kind"} == OF_THE_GRANT | OF_THE_PAST - {"rebuild"}


UNDER_ANOTHER = {
    "session": ({"session": f"{7:032x}"}, "failed"),
    "epoch, an earlier one": ({"epoch": 4}, "not_yours"),
    "epoch, a later one": ({"epoch": 6}, "not_yours"),
}


@pytest.mark.parametrize("by", [Open, Reroute])
@pytest.mark.parametrize("what", UNDER_ANOTHER)
async def test_a_frame_under_another_grant_is_refused(
    first: Site, owner: Peer, stranger: Peer, what: str, by: type[Message]
):
    request = await granted(owner, first, by, previous=stranger.peer)
    changes, expected = UNDER_ANOTHER[what]
    message, tensors = step(request, 1, activations(1, 2), **changes)
    answer = await stranger.ask(first, message, tensors)
    assert (answer.kind if isinstance(answer, Failed) else code(answer)) == expected
    assert first.computed == []
    assert first.server.pool.used == 0


@pytest.mark.parametrize("by", [Open, Reroute])
async def test_a_grant_to_another_peer_or_for_less_is_refused_to_this_one(
    first: Site, owner: Peer, stranger: Peer, by: type[Message]
):
    for grant, expected in (
        ({"previous": first.peer}, "not_yours"),
        ({"previous": None}, "not_yours"),
        ({"previous": stranger.peer, "tokens_max": 1}, "grant_over"),
        ({"previous": stranger.peer, "lifetime_s": 1}, "grant_over"),
    ):
        request = await granted(owner, first, by, **grant)
        if "lifetime_s" in grant:
            session = first.server.handler.sessions[request.session]
            assert 0 < session.grant.ends_at - asyncio.get_running_loop().time() <= 1
            session.grant.ends_at -= 1.01
        (await stranger.to(first)).send(*step(request, 1, activations(1, 2)))
        hears = stranger if expected == "not_yours" else owner
        assert code(await hears.next()) == expected
    assert first.computed == []


async def test_outputs_go_to_the_next_hop_or_through_the_owner_and_not_both(first: Site, second: Site, owner: Peer):
    request = await opened(owner, first)
    both = {"next_record": second.record(), "relay": True}
    assert code(await owner.ask(first, open_for(first, **both))) == "bad_request"
    assert code(await owner.ask(first, Reroute(session=request.session, epoch=1, **both))) == "bad_request"


async def granted(owner: Peer, site: Site, by: type[Message], **grant: object) -> Open:
    """Let a neighbour in by either message, in epoch 5."""
    if by is Open:
        return await opened(owner, site, epoch=5, **grant)
    request = await opened(owner, site, epoch=4)
    again = Reroute.model_validate({"session": request.session, "epoch": 5, **grant})
    assert isinstance(await owner.ask(site, again), Rerouted)
    return request.model_copy(update={"epoch": 5})


async def test_a_grant_for_another_span_or_peer_is_refused(first: Site, second: Site, owner: Peer, stranger: Peer):
    for start, stop in ((0, 4), (3, 6), (2, 2)):
        assert code(await owner.ask(first, open_for(first, start=start, stop=stop))) == "not_served"
    request = await opened(owner, first, next_record=second.record())  # outputs of first, which has blocks 0:3
    await opened(owner, second, session=request.session, previous=stranger.peer)  # from somebody else, it says
    (await owner.to(first)).send(*step(request, 1, activations(1, 2)))
    refused = await owner.next()  # by second, through first
    assert isinstance(refused, Failed)
    assert "another peer" in refused.why
    assert second.computed == []
    assert code(await owner.ask(second, *step(request, 1, activations(1, 2)))) == "not_yours"
    assert second.computed == []


async def test_an_owner_whose_connection_is_dead_opens_its_session_anew_with_a_later_epoch(first: Site, owner: Peer):
    free = first.server.handler._pool.free()
    request = await opened(owner, first, epoch=3)
    (await owner.to(first)).send(*step(request, 1, activations(1, 4), want=4))
    await owner.output()
    assert first.server.handler._pool.free() < free
    for epoch in (2, 3):
        assert code(await owner.ask(first, request.model_copy(update={"epoch": epoch}))) == "not_yours"
    assert isinstance(await owner.ask(first, request.model_copy(update={"epoch": 4})), Opened)
    assert [session.epoch for session in first.server.handler.sessions.values()] == [4]
    assert first.server.handler._pool.free() == free
    (await owner.to(first)).send(*step(request.model_copy(update={"epoch": 4}), 1, activations(1, 4), want=4))
    await owner.output()


async def test_a_grant_ends_with_its_time_and_a_reroute_gives_another(first: Site, owner: Peer, stranger: Peer):
    request = await opened(owner, first, previous=stranger.peer, lifetime_s=60)
    (await stranger.to(first)).send(*step(request, 1, activations(1, 2)))
    await owner.output()
    session = first.server.handler.sessions[request.session]
    assert 0 < session.grant.ends_at - asyncio.get_running_loop().time() <= 60
    session.grant.ends_at -= 61
    late, hidden = step(request, 2, activations(1, 1), keep=2)
    (await stranger.to(first)).send(late, hidden)
    assert code(await owner.next()) == "grant_over"
    assert len(first.computed) == 1
    again = Reroute(session=request.session, epoch=1, previous=stranger.peer, lifetime_s=60)
    assert isinstance(await owner.ask(first, again), Rerouted)
    (await stranger.to(first)).send(late.model_copy(update={"epoch": 1}), hidden)
    await owner.output()


async def test_a_grant_ends_with_its_tokens_and_those_of_all_rows_count(first: Site, owner: Peer):
    request = await opened(owner, first, tokens_max=10)
    (await owner.to(first)).send(*step(request, 1, activations(3, 3)))
    await owner.output()
    assert code(await owner.ask(first, *step(request, 2, activations(3, 1), keep=3))) == "grant_over"
    assert first.server.handler.sessions[request.session].grant.tokens == 1
    (await owner.to(first)).send(*step(request, 2, activations(1, 1), keep=3, rows=(0,)))
    await owner.output()
    assert code(await owner.ask(first, *step(request, 3, activations(1, 1), keep=4))) == "grant_over"
    assert len(first.computed) == 2


async def test_a_past_that_is_rebuilt_is_part_of_the_grant(first: Site, owner: Peer):
    request = await opened(owner, first, after_step=1, rebuild=True, tokens_max=3)
    piece = activations(1, 4)
    assert code(await owner.ask(first, rebuild(request, 0, 4, piece), Activations(piece))) == "grant_over"
    assert first.server.pool.used == 0


@pytest.mark.parametrize("times", [1, 2])
async def test_a_rebuilt_hop_is_where_the_dead_one_was(loaded: Loaded, first: Site, owner: Peer, times: int):
    """Pieces that come twice change nothing."""
    request = await opened(owner, first, after_step=7, rebuild=True)
    channel = await owner.to(first)
    early, token = step(request, 8, activations(1, 1), keep=6)
    assert code(await owner.ask(first, early, token)) == "out_of_order"  # it has no past yet
    past = activations(1, 6)
    for start in (0, 4):
        piece = past[:, start : start + 4]
        for _ in range(times):
            channel.send(rebuild(request, start, 6, piece), Activations(piece))
    assert [await owner.next() for _ in range(2)] == [rebuilt(request, 4), rebuilt(request, 6)]
    channel.send(early, token)
    expected = span_output(loaded, FIRST, torch.cat([past, activations(1, 1)], dim=1))[:, -1:]
    assert (await owner.output() - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(("start", "total", "rows"), [(1, 6, 1), (0, 2, 1), (0, 10_000, 1)], ids=str)
async def test_a_malformed_piece_of_the_past_is_refused(first: Site, owner: Peer, start: int, total: int, rows: int):
    request = await opened(owner, first, after_step=1, rebuild=True)
    piece = activations(rows, 3)
    assert code(await owner.ask(first, rebuild(request, start, total, piece), Activations(piece))) == "bad_request"


async def test_a_past_that_nobody_asked_for_is_refused_and_a_strangers_is_not_looked_at(
    first: Site, owner: Peer, stranger: Peer
):
    request = await opened(owner, first)
    piece = activations(1, 3)
    assert code(await owner.ask(first, rebuild(request, 0, 3, piece), Activations(piece))) == "bad_request"
    (await stranger.to(first)).send(rebuild(request, 0, 3, piece), Activations(piece))
    await stranger.settled(first)
    assert stranger.inbox.empty()
    assert first.server.pool.used == 0


async def test_no_more_of_a_past_is_sent_than_the_next_hop_has_not_confirmed(
    first: Site, owner: Peer, stranger: Peer, monkeypatch: pytest.MonkeyPatch
):
    """The first piece goes alone, then a window. Only the next hop counts, and of this route."""
    monkeypatch.setattr(journal_module, "CHUNK_BYTES", 4 * HIDDEN * 4)
    monkeypatch.setattr(journal_module, "REPLAY_BYTES_MAX", 3 * 4 * HIDDEN * 4)
    request = await opened(owner, first, relay=True)
    channel = await owner.to(first)
    channel.send(*step(request, 1, activations(1, 30)))
    assert isinstance(await owner.next(), Step)

    async def pieces(*said: Rebuilt, by: Peer = owner) -> list[int]:
        for message in said:
            (await by.to(first)).send(message)
        for peer in (by, owner):
            await peer.settled(first)
        return [message.start for message, _ in (owner.inbox.get_nowait() for _ in range(owner.inbox.qsize()))]

    channel.send(Replay(session=request.session, epoch=0, step=1, hops=1))
    assert await pieces() == [0]
    assert await pieces(rebuilt(request, 30), by=stranger) == []
    assert await pieces(rebuilt(request, 30).model_copy(update={"epoch": 1})) == []
    assert await pieces(rebuilt(request, 3)) == []
    assert await pieces(rebuilt(request, 4)) == [4, 8, 12]
    assert await pieces(rebuilt(request, 4)) == []
    assert await pieces(rebuilt(request, 12)) == [16, 20]
    assert await pieces(rebuilt(request, 30), rebuilt(request, 30)) == [24, 28]
    assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=1, relay=True)), Rerouted)
    channel.send(Replay(session=request.session, epoch=1, step=1, hops=1))
    assert await pieces() == [0]
    assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=2, relay=True)), Rerouted)
    for epoch in (1, 2):
        assert await pieces(rebuilt(request, 4).model_copy(update={"epoch": epoch})) == []


async def test_a_past_is_replayed_once_an_epoch_however_often_it_is_asked_for(
    first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    """To find it is work for the event loop, and asking costs nothing; another epoch is charged."""
    found: list[int] = []
    past_after = Journal.past_after
    monkeypatch.setattr(Journal, "past_after", lambda self, step: (found.append(step), past_after(self, step))[1])
    request = await opened(owner, first, relay=True)
    channel = await owner.to(first)
    channel.send(*step(request, 1, activations(1, 4)))
    assert isinstance(await owner.next(), Step)
    for epoch in (0, 1):
        if epoch:
            assert isinstance(await owner.ask(first, Reroute(session=request.session, epoch=1, relay=True)), Rerouted)
        for confirmed in (False, True):
            for _ in range(3):
                channel.send(Replay(session=request.session, epoch=epoch, step=1, hops=1))
            if not confirmed:
                assert isinstance(await owner.next(), Rebuild)
                channel.send(rebuilt(request, 4).model_copy(update={"epoch": epoch}))
        await owner.settled(first)
        assert owner.inbox.empty()
        assert found == [1] * (epoch + 1)


async def test_a_journal_that_gathers_make_too_large_is_dropped_before_anything_of_it_is_copied(
    first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    """Many rows for one step only, at which the steps before are put together: no other step has to pay for them."""
    unfolded, rows, length = 8, 16, 8
    handler, joined = first.server.handler, journal_module._joined
    copied: list[int] = []

    def noted(*what: object) -> Past:
        whole = joined(*what)
        copied.append(whole.n_bytes)
        return whole

    monkeypatch.setattr(journal_module, "JournalLimits", partial(JournalLimits, unfolded))
    monkeypatch.setattr(journal_module, "_joined", noted)
    handler.journals.capacity = rows * length * HIDDEN * 4
    request = await opened(owner, first, relay=True)
    (session,) = handler.sessions.values()
    channel = await owner.to(first)
    for number in range(1, unfolded + 2):
        has = rows if number == unfolded // 2 else 1
        order = {unfolded // 2: (0,) * rows, unfolded // 2 + 1: (0,)}.get(number)
        hidden = activations(has, 1 if number > 1 else length)
        channel.send(*step(request, number, hidden, keep=length if number > 1 else 0, rows=order))
        assert isinstance(await owner.next(), Step)
        assert (session.journal is None) == (number > unfolded)
    assert copied == []
    assert handler.journals.used == 0


async def test_what_a_replay_keeps_is_charged_until_it_is_over_and_steps_do_not_end_it(
    first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch
):
    """Whoever confirms nothing, and goes on from the start, had kept the whole past uncharged."""
    monkeypatch.setattr(journal_module, "JournalLimits", partial(JournalLimits, 4))
    monkeypatch.setattr(journal_module, "CHUNK_BYTES", 10 * HIDDEN * 4)
    request = await opened(owner, first, relay=True)
    channel, journals = await owner.to(first), first.server.handler.journals
    (session,) = first.server.handler.sessions.values()
    channel.send(*step(request, 1, activations(1, 50)))
    await owner.next()
    whole = journals.used
    channel.send(Replay(session=request.session, epoch=0, step=1, hops=1))
    assert isinstance(await owner.next(), Rebuild)  # the first piece, alone
    for number in range(2, 9):  # those that were on their way, in an honest session
        channel.send(*step(request, number, activations(1, 1)))
        assert isinstance(await owner.next(), Step)
        assert journals.used >= whole
    session.drop_journal()
    assert journals.used >= whole
    channel.send(rebuilt(request, 10))
    assert [(await owner.next()).start for _ in range(4)] == [10, 20, 30, 40]
    await until(lambda: journals.used == 0)
    channel.send(Replay(session=request.session, epoch=0, step=8, hops=1))
    await owner.settled(first)
    assert owner.inbox.empty()  # once an epoch, still


async def test_a_confirmation_that_is_no_news_is_idle(first: Site, owner: Peer):
    request = await opened(owner, first, relay=True)
    channel, handler = await owner.to(first), first.server.handler
    channel.send(*step(request, 1, activations(1, 4)))
    await owner.next()
    channel.send(Replay(session=request.session, epoch=0, step=1, hops=1))
    await owner.next()
    for stop, toll in ((3, IDLE), (4, PROGRESS), (4, IDLE)):
        assert handler.on_message(handler.sessions[request.session].owner, rebuilt(request, stop), None) == toll


async def test_a_hop_confirms_a_past_that_goes_on_when_those_behind_it_do(first: Site, owner: Peer, stranger: Peer):
    request = await opened(owner, first, previous=stranger.peer, relay=True, after_step=1, rebuild=True)
    channel, past = await stranger.to(first), activations(1, 8)
    for start in (0, 4):
        piece = past[:, start : start + 4]
        channel.send(rebuild(request, start, 8, piece).model_copy(update={"hops": 2}), Activations(piece))
    assert [(await owner.next()).kind for _ in range(3)] == ["rebuild", "rebuild", "rebuilt"]
    (await owner.to(first)).send(rebuilt(request, 4))
    assert await stranger.next() == rebuilt(request, 4)
    (await owner.to(first)).send(rebuilt(request, 8))
    assert await stranger.next() == rebuilt(request, 8)
    assert stranger.inbox.empty()
    assert owner.inbox.empty()


async def test_a_past_is_begun_where_there_is_room_for_a_window_of_it(first: Site, owner: Peer):
    """Many pasts that all came in part would refuse each other's rest, for ever."""
    windows = first.server.handler.windows
    windows.capacity = 9 * 6 * HIDDEN * 4 // 8 + 1  # one peer may have 8/9 of it, which is one such past
    requests = [await opened(owner, first, after_step=1, rebuild=True) for _ in range(2)]
    channel, past = await owner.to(first), activations(1, 6)
    begin, end = past[:, :4], past[:, 4:]
    assert await owner.ask(first, rebuild(requests[0], 0, 6, begin), Activations(begin)) == rebuilt(requests[0], 4)
    assert code(await owner.ask(first, rebuild(requests[1], 0, 6, begin), Activations(begin))) == "busy"
    assert await owner.ask(first, rebuild(requests[0], 4, 6, end), Activations(end)) == rebuilt(requests[0], 6)
    assert windows.used == 0
    assert await owner.ask(first, rebuild(requests[1], 0, 6, begin), Activations(begin)) == rebuilt(requests[1], 4)
    again = Reroute(session=requests[1].session, epoch=1, reset=True, after_step=1)
    assert isinstance(await owner.ask(first, again), Rerouted)
    assert windows.used == 0
    channel.send(Close(session=requests[0].session))
    channel.send(Close(session=requests[1].session))
    await until(lambda: first.idle)


async def test_room_for_a_past_is_kept_by_whoever_sends_it(first: Site, owner: Peer, monkeypatch: pytest.MonkeyPatch):
    """Else the beginnings of many pasts, of which nothing more comes, keep all others from being rebuilt."""
    monkeypatch.setattr(session_module, "CHUNK_BYTES", 2 * 4 * HIDDEN * 4)  # half of it is what comes first
    request = await opened(owner, first, after_step=1, rebuild=True)
    windows, (session,) = first.server.handler.windows, first.server.handler.sessions.values()
    past = activations(1, 8)
    assert await owner.ask(first, rebuild(request, 0, 8, past[:, :4]), Activations(past[:, :4])) == rebuilt(request, 4)
    session.keep_window_if_used()
    assert windows.used == past.nbytes
    assert await owner.ask(first, rebuild(request, 4, 8, past[:, 4:5]), Activations(past[:, 4:5])) == rebuilt(
        request, 5
    )
    session.keep_window_if_used()
    assert windows.used == 0
    assert await owner.ask(first, rebuild(request, 5, 8, past[:, 5:]), Activations(past[:, 5:])) == rebuilt(request, 8)


def rebuilt(request: Open, stop: int) -> Rebuilt:
    return Rebuilt(session=request.session, epoch=request.epoch, stop=stop)


def rebuild(request: Open, start: int, total: int, piece: Tensor) -> Rebuild:
    return Rebuild(
        session=request.session, epoch=request.epoch, start=start, total=total, hops=1, hidden=meta_of(piece)
    )


def open_for(site: Site, **changes: object) -> Open:
    """What opens a session of the server's whole span, for its owner alone."""
    span = site.server.span
    request = Open(
        session=f"{next(_names):032x}",
        epoch=0,
        root=site.server.announcement("online").root,
        numeric_class="float32",
        start=span.blocks.start,
        stop=span.blocks.stop,
        positions_max=100,
        rollback_max=0,
    )
    return request.model_copy(update=changes)


async def opened(owner: Peer, site: Site, **changes: object) -> Open:
    request = open_for(site, **changes)
    assert isinstance(await owner.ask(site, request), Opened)
    return request


async def opened_ring(owner: Peer, first: Site, second: Site) -> Open:
    """Open one session on both: first hands on to second, and that to the owner."""
    request = await opened(owner, first, next_record=second.record())
    await opened(owner, second, session=request.session, previous=first.peer)
    return request


def step(
    request: Open,
    number: int,
    hidden: Tensor,
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    keep: int = 0,
    want: int = 1,
    **changes: object,
) -> tuple[Step, Activations]:
    message = Step(
        session=request.session,
        epoch=request.epoch,
        step=number,
        keep=keep,
        budget_ms=60_000,
        want=want,
        hidden=meta_of(hidden),
        positions=None if positions is None else meta_of(positions),
        mask=None if mask is None else meta_of(mask),
    )
    return message.model_copy(update=changes), Activations(hidden, positions, mask)


def held_up(site: Site) -> asyncio.Event:
    """Keep the server from computing until the event that is returned is set."""
    release, loop = asyncio.Event(), asyncio.get_running_loop()
    site.server._executor.submit(
        lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(), lambda _: None
    )
    return release


def code(answer: AnyMessage) -> str:
    assert isinstance(answer, Refused), answer
    return answer.code


def packed(announcement: Announcement, signer: Identity) -> str:
    return b64encode(sign_announcement(announcement, signer)).decode()


def activations(rows: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def span_output(loaded: Loaded, blocks: Blocks, hidden: Tensor) -> Tensor:
    with torch.inference_mode():
        return loaded.spans[blocks].forward(hidden, cache=None)


def local(loaded: Loaded, hidden: Tensor) -> Tensor:
    return span_output(loaded, SECOND, span_output(loaded, FIRST, hidden))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)
