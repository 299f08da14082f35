"""An auditor of a whole swarm, over real sockets: it draws servers, finds the wrong one, and takes no other for it."""

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from swarm.client.auditing.docket import Findings
from swarm.client.auditing.evidence import Evidence
from swarm.client.auditing.passages import Passages
from swarm.client.auditing.patrol import Patrol, PatrolLimits
from swarm.client.auditing.verify import verify
from swarm.client.planning.router import Wanted
from swarm.client.session.membership import joined
from swarm.client.session.plan import SessionPlan
from swarm.dht.directory import Directory
from swarm.identity import Identity
from swarm.model.loading import load_ends
from swarm.model.tokens import TokenEnds
from swarm.monitor import audit
from swarm.monitor.audit import AuditArguments
from swarm.monitor.auditing import Orders
from swarm.protocol import receipts
from swarm.protocol.messages import POSITIONS_MAX
from tests.client.test_audits import leaves_a_block_out
from tests.support.inprocess import NETWORK, InProcessSwarm, inprocess

SPANS = ("0:3", "0:3", "0:3", "3:6", "3:6")
SHORT = PatrolLimits(prompt=(8, 16), steps=(4, 8))


class Auditing:
    """Audits the servers of a swarm, each time as a new client."""

    def __init__(self, swarm: InProcessSwarm, limits: PatrolLimits = SHORT, seed: int = 0) -> None:
        self.evidence: list[Evidence] = []
        checkpoint, draws = swarm.checkpoint, Random(seed)
        ends = TokenEnds(load_ends(checkpoint, dtype=swarm.dtype), checkpoint.traits)
        passages = Passages(None, ends.vocabulary, draws)
        wanted = Wanted(checkpoint.root, "tiny", checkpoint.n_blocks, None)
        self.swarm = swarm

        def text(positions: int) -> torch.Tensor:
            return ends.embed(torch.tensor([passages.ids(positions)]), 0)

        positions_max = checkpoint.traits.positions_max or POSITIONS_MAX
        self.patrol = Patrol(wanted, text, positions_max, limits, draws, self.evidence.append)

    def audit(self, answering: Collection[str] | None = None, left_out: Collection[str] = ()) -> Findings:
        servers = [peer_of(server) for server in self.swarm.servers]

        @asynccontextmanager
        async def join() -> AsyncIterator[Directory]:
            yield self.swarm.directory()

        async def once() -> Findings:
            async with joined(join, Identity.generate(), network=NETWORK) as member:
                return await self.patrol.audit(member, servers if answering is None else answering, left_out)

        return self.swarm.loop.run(once())


def peer_of(server: Any) -> str:
    return server.me.identity.peer_id


@pytest.mark.long
def test_honest_servers_agree_and_each_is_audited(checkpoint):
    with inprocess(checkpoint, *SPANS) as swarm:
        auditing, servers = Auditing(swarm, seed=1), {peer_of(server) for server in swarm.servers}
        findings = [auditing.audit() for _ in range(12)]
        assert all((each.doubted, each.wrong, each.why) == (frozenset(), frozenset(), "") for each in findings)
        assert frozenset[str]().union(*(each.agreed for each in findings)) == servers
        assert {each.drawn for each in findings} == servers, "some server was never drawn"


def test_a_server_that_leaves_a_block_out_is_found_and_no_other(checkpoint):
    with inprocess(checkpoint, *SPANS) as swarm:
        liar = peer_of(swarm.serve("3:6", lie=leaves_a_block_out))
        auditing, wrong = Auditing(swarm), set[str]()
        for _ in range(20):
            wrong |= auditing.audit(left_out=wrong).wrong
        assert wrong == {liar}
        assert not auditing.patrol.doubted, "what a wrong server explains is no doubt any more"
        (evidence,) = auditing.evidence
        assert evidence.receipt.statement.peer_id == liar
        finding = verify(Evidence.read(evidence.to_bytes()), swarm.checkpoint)
        assert finding.is_wrong


@pytest.mark.long
def test_a_wrong_server_that_breaks_its_sessions_off_is_found(checkpoint):
    def lie(span: Any) -> None:
        leaves_a_block_out(span)
        steps = 0

        def hook(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
            nonlocal steps
            steps += output.shape[1] == 1
            if output.shape[1] == 1 and steps > 2:
                raise RuntimeError("breaks off")
            return output

        next(module for name, module in span.model.named_modules() if name.endswith("mlp")).register_forward_hook(hook)

    with inprocess(checkpoint, "0:6", "0:6") as swarm:
        liar, auditing = peer_of(swarm.serve("0:6", lie=lie)), Auditing(swarm, replace(SHORT, step_s=1.0))
        for _ in range(12):
            findings = auditing.audit()
            if findings.drawn == liar:
                break
        assert (findings.wrong, findings.why) == ({liar}, "")


def test_a_slow_server_is_audited_for_what_it_told_in_time(checkpoint):
    steps = 0

    def lie(span: Any) -> None:
        leaves_a_block_out(span)

        def hook(module: object, inputs: object, output: torch.Tensor) -> None:
            nonlocal steps
            if output.shape[1] == 1:
                steps += 1
                time.sleep(0.1)

        next(module for name, module in span.model.named_modules() if name.endswith("mlp")).register_forward_hook(hook)

    with inprocess(checkpoint, "0:6", "0:6") as swarm:
        liar = peer_of(swarm.serve("0:6", lie=lie))
        auditing = Auditing(swarm, replace(SHORT, steps=(80, 80), session_s=0.5))
        for _ in range(12):
            steps = 0
            findings = auditing.audit()
            if findings.drawn == liar:
                break
        assert (findings.wrong, findings.why) == ({liar}, "")
        assert steps < 80, "beside those of a session for evidence"


def test_an_audit_asks_for_as_many_positions_as_users_do(checkpoint, monkeypatch):
    asked, terms = set[int](), SessionPlan.terms

    def noted(plan: SessionPlan, *args: Any, **kwargs: Any) -> Any:
        asked.add(plan.positions_max)
        return terms(plan, *args, **kwargs)

    monkeypatch.setattr(SessionPlan, "terms", noted)
    with inprocess(checkpoint, *SPANS) as swarm:
        with swarm.client() as model:
            model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2, pad_token_id=0)
        assert len(asked) == 1
        assert Auditing(swarm).audit().agreed
        assert len(asked) == 1


def falsely(liar: Any, lie: str) -> Any:
    """Return `Receipt.sign` with which a server signs another digest than it has."""
    sign = receipts.Receipt.sign

    def signed(statement: receipts.Statement, identity: Identity) -> receipts.Receipt:
        if identity is liar.me.identity:
            statement = statement.model_copy(update={lie: "0" * 64})
        return sign(statement, identity)

    return signed


@pytest.mark.parametrize("lie", ["inputs", "outputs"])
def test_a_server_that_signs_what_is_not_so_is_in_doubt_with_its_neighbour(checkpoint, lie, monkeypatch):
    with inprocess(checkpoint, "0:3", "3:6", "0:6") as swarm:
        liar = swarm.servers[0]
        before, behind = (peer_of(server) for server in swarm.servers[:2])
        auditing = Auditing(swarm)
        auditing.audit()
        assert not auditing.patrol.doubted
        monkeypatch.setattr(receipts.Receipt, "sign", falsely(liar, lie))
        for _ in range(12):
            auditing.audit([before, behind])  # which have no other holders: nothing else is found
            if auditing.patrol.doubted:
                break
        assert auditing.patrol.doubted == ({before} if lie == "inputs" else {before, behind})


@pytest.mark.parametrize("lie", ["inputs", "outputs"])
def test_right_outputs_excuse_no_false_signature(checkpoint, lie, monkeypatch):
    with inprocess(checkpoint, *SPANS) as swarm:
        liar = swarm.servers[0]
        monkeypatch.setattr(receipts.Receipt, "sign", falsely(liar, lie))
        auditing, wrong = Auditing(swarm), frozenset[str]()
        for _ in range(40):
            found = auditing.audit()
            wrong |= found.wrong
            if wrong:
                break
        assert wrong == {peer_of(liar)}
        assert auditing.patrol.doubted <= wrong
        assert sum(bool(auditing.audit(left_out=wrong).wrong) for _ in range(4)) == 0


@pytest.mark.long
def test_servers_that_do_not_answer_the_page_are_neither_drawn_nor_asked(checkpoint):
    with inprocess(checkpoint, *SPANS) as swarm:
        auditing = Auditing(swarm)
        silent = peer_of(swarm.servers[0])
        answering = [peer_of(server) for server in swarm.servers[1:]]
        seen = [auditing.audit(answering) for _ in range(8)]
        assert all(silent not in each.agreed | {each.drawn} for each in seen)
        assert auditing.audit(answering=[]).why == "no server that answers serves the model"


@pytest.mark.long
def test_a_holder_that_is_alone_keeps_no_other_from_being_audited(checkpoint):
    with inprocess(checkpoint, "0:2", "2:4", "4:6", "4:6") as swarm:
        auditing, alone = Auditing(swarm), {peer_of(server) for server in swarm.servers[:2]}
        findings = [auditing.audit() for _ in range(6)]
        agreed = frozenset[str]().union(*(each.agreed for each in findings))
        assert agreed == {peer_of(server) for server in swarm.servers[2:]}
        assert not agreed & alone


def test_texts_differ_and_have_the_length_that_is_wanted():
    words = Passages(lambda text: [ord(each) % 100 for each in text], 100, Random(1))
    texts = [words.ids(50) for _ in range(8)]
    assert all(len(text) == 50 and max(text) < 100 for text in texts)
    assert len({tuple(text) for text in texts}) == 8


@pytest.mark.parametrize("tokenize", [None, lambda text: []])
def test_a_model_without_a_tokenizer_gets_drawn_tokens(tokenize):
    ids = Passages(tokenize, 100, Random(1)).ids(50)
    assert (len(ids), min(ids) >= 0, max(ids) < 100) == (50, True, True)


async def test_an_audit_that_fails_in_any_way_does_not_end_the_auditor(monkeypatch):
    @asynccontextmanager
    async def member(*_: object, **__: object) -> AsyncIterator[None]:
        yield None

    class Failing:
        async def audit(self, *_: object) -> Findings:
            raise ValueError("of a stranger's making")

    monkeypatch.setattr(audit, "joined", member)
    arguments = AuditArguments(
        models=(), every_s=1.0, share=1.0, evidence=None, initial_peers=(), network=NETWORK, network_key=None,
        allow_peers=None, identity=None,
    )  # fmt: skip
    found = await audit.audited(Failing(), arguments, Orders(answering=(), left_out=()))
    assert "ValueError" in found.why
