"""Servers that compute wrongly, over real sockets: audits find them, and sessions leave them."""

from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

import pytest
import torch

from swarm.client.auditing.auditor import AuditLimits
from swarm.client.planning.route import process_of
from swarm.client.planning.router import RouterLimits
from swarm.client.session.restore import Restorer
from swarm.errors import NoRoute
from tests.client.test_repair import ONE, SPANS, After, route_of, settings
from tests.support.inprocess import inprocess
from tests.support.swarms import eventually

ALL = AuditLimits(share=1.0)


def leaves_a_block_out(span):
    """A block whose attention and feed-forward add nothing."""
    for name, parameter in span.model.named_parameters():
        if f"layers.{span.blocks.start}." in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()


def is_off_at_times(span):
    """One of the first eight steps of one token has outputs that are 5 % off, and so on."""
    steps = 0

    def hook(module, inputs, output):
        nonlocal steps
        steps += output.shape[1] == 1
        if steps % 8 != 5 or output.shape[1] > 1:
            return output
        return output + 0.05 * output.norm() / output.shape[-1] ** 0.5 * torch.randn_like(output)

    blocks = {name.rpartition("layers.")[2]: module for name, module in span.model.named_modules()}
    blocks[f"{span.blocks.start}.mlp"].register_forward_hook(hook)


def is_off_in_single_steps(span):
    """Steps of one token have outputs that are 5 % off. So a prompt is right."""

    def hook(module, inputs, output):
        return output if output.shape[1] > 1 else 1.05 * output

    blocks = {name.rpartition("layers.")[2]: module for name, module in span.model.named_modules()}
    blocks[f"{span.blocks.start}.mlp"].register_forward_hook(hook)


def n_audits(model):
    audits = model.audits
    return audits.agreed + audits.disputed + audits.unaudited


@contextmanager
def audited(swarm, audits=ALL):
    """A client that audits every session."""
    with swarm.client(audits=audits) as model:
        yield model


def generate(model, *criteria):
    """Generate, and wait until the session is audited."""
    before = n_audits(model)
    ids = model.generate(ONE, **settings(*criteria))
    eventually(lambda: n_audits(model) > before, 60)
    return ids


def test_honest_servers_agree(checkpoint, full):
    with inprocess(checkpoint, *SPANS, "0:6") as swarm, audited(swarm) as model:
        assert torch.equal(generate(model), full.generate(ONE, **settings()))
        generate(model)
        assert (model.audits.agreed, model.audits.disputed, model.audits.wrong) == (2, 0, ())


def test_replays_are_drawn_and_servers_that_agreed_are_confirmed(checkpoint):
    with inprocess(checkpoint, *SPANS, "0:6") as swarm, audited(swarm) as model:
        router = model.backend.membership.router
        plan, drawn = router.plan, []

        async def noted(*arguments, draws=None, **options):
            drawn.append(draws is not None)
            return await plan(*arguments, draws=draws, **options)

        router.plan = noted
        generate(model)
        assert drawn == [False, True]
        hops = {*(hop.peer_id for hop in model.route), *(server.me.identity.peer_id for server in swarm.servers)}
        assert len(router.evidence.confirmed) == len(hops) == 4
        assert "audited" in model.route.explain()


def test_server_that_leaves_a_block_out_is_found_and_left(checkpoint, full):
    with inprocess(checkpoint, *SPANS) as swarm, audited(swarm) as model:
        liar = swarm.serve("0:6", lie=leaves_a_block_out)
        swarm.serve("0:3")
        swarm.serve("3:6")
        for _ in range(2):
            generate(model)
        assert model.audits.wrong == (liar.me.identity.peer_id,)
        assert model.backend.membership.sessions.avoidance.banned == {liar.me.identity.peer_id}
        assert torch.equal(generate(model), full.generate(ONE, **settings()))
        assert liar not in route_of(swarm, model)


def test_a_server_that_is_wrong_in_single_steps_alone_is_found(checkpoint):
    with inprocess(checkpoint) as swarm, audited(swarm) as model:
        liar = swarm.serve("0:6", lie=is_off_in_single_steps)
        swarm.serve("0:6")
        swarm.serve("0:6")
        for _ in range(8):
            generate(model)
        assert model.audits.wrong == (liar.me.identity.peer_id,)


def test_a_replay_opens_and_begins_as_its_session_did(checkpoint):
    with inprocess(checkpoint, "0:6", "0:6") as swarm, audited(swarm) as model:
        sessions, opened = model.backend.membership.sessions, []
        open_one = sessions.open

        async def noted(plan, blocks, planner, limits=None, first=None, *options):
            terms = plan.terms(plan.batch, plan.positions_soon, is_first=True)
            opened.append((terms, first and (first.activations.tokens, first.want)))
            return await open_one(plan, blocks, planner, limits, first, *options)

        sessions.open = noted
        generate(model)
        session, replay = opened
        assert session == replay
        assert session[1] == (ONE.shape[1], 1)


def test_a_wrong_server_that_leaves_its_sessions_is_found(checkpoint):
    with inprocess(checkpoint, *SPANS) as swarm, audited(swarm) as model:
        liar = swarm.serve("0:6", lie=leaves_a_block_out)
        swarm.serve("0:3")
        swarm.serve("3:6")

        def leave():
            swarm.loop.start(liar.handler.registry.drain(20.0))

        generate(model, After(4, leave))
        assert liar not in route_of(swarm, model)
        assert (model.audits.disputed, model.audits.wrong) == (1, (liar.me.identity.peer_id,))


def test_an_audit_that_runs_out_of_replays_convicts_nobody_and_its_servers_are_avoided(checkpoint):
    with inprocess(checkpoint) as swarm, audited(swarm, replace(ALL, replays_max=1)) as model:
        liar = swarm.serve("0:6", lie=leaves_a_block_out)
        other = swarm.serve("0:6")
        generate(model)
        assert (model.audits.disputed, model.audits.wrong) == (1, ())
        avoided = {process.partition("/")[0] for process in model.backend.membership.sessions.avoidance.processes}
        assert len(avoided & {liar.me.identity.peer_id, other.me.identity.peer_id}) == 1


def test_an_audit_that_runs_out_before_any_replay_avoids_nobody(checkpoint):
    with inprocess(checkpoint, *SPANS) as swarm, audited(swarm, replace(ALL, replays_max=1)) as model:
        generate(model)  # each server is alone with its blocks
        assert (model.audits.disputed, model.audits.unaudited) == (0, 1)
        assert not model.backend.membership.sessions.avoidance.processes


@pytest.mark.long
def test_chat_on_a_wrong_server_begins_anew_elsewhere(checkpoint, full):
    with inprocess(checkpoint) as swarm, audited(swarm) as model:
        model.backend.membership.router.limits = RouterLimits(survey_fresh_s=0.0, survey_age_s=0.0)
        liar = swarm.serve("0:6", lie=leaves_a_block_out)
        with model.inference_session(max_length=64):
            said = model.generate(ONE, **settings())
            assert not torch.equal(said, full.generate(ONE, **settings()))
            for blocks in (*SPANS, "0:3", "3:6"):
                swarm.serve(blocks)
            beside = Thread(target=generate, args=(model,))
            beside.start()
            eventually(lambda: model.audits.wrong == (liar.me.identity.peer_id,), 120)
            beside.join()
            assert torch.equal(model.generate(said, **settings()), full.generate(said, **settings()))
            assert not liar.handler.sessions


def test_a_server_that_is_found_while_a_session_opens_computes_nothing_of_it(checkpoint, full, monkeypatch):
    real = Restorer.restore

    async def restore(self, deadline):
        await real(self, deadline)
        sessions.expel(f"{liar.me.identity.peer_id}/another process")

    with inprocess(checkpoint, "0:6") as swarm, audited(swarm, replace(ALL, share=0.0)) as model:
        (honest,), sessions = swarm.servers, model.backend.membership.sessions
        liar = swarm.serve("0:6", lie=leaves_a_block_out)
        sessions.avoidance.declined(process_of(honest.announcement("online")), 60.0)
        monkeypatch.setattr(Restorer, "restore", restore)
        assert torch.equal(model.generate(ONE, **settings()), full.generate(ONE, **settings()))
        assert route_of(swarm, model) == [honest]


def test_no_process_of_a_wrong_peer_keeps_a_session(checkpoint, full):
    with inprocess(checkpoint) as swarm, audited(swarm, replace(ALL, share=0.0)) as model:
        liar = swarm.serve("0:6", lie=leaves_a_block_out)
        with model.inference_session(max_length=64):
            said = model.generate(ONE, **settings())
            honest, sessions = swarm.serve("0:6"), model.backend.membership.sessions
            model.backend._loop.run(_call(sessions.expel, f"{liar.me.identity.peer_id}/another process"))
            model.backend.membership.router.limits = RouterLimits(survey_fresh_s=0.0, survey_age_s=0.0)
            assert torch.equal(model.generate(said, **settings()), full.generate(said, **settings()))
            assert route_of(swarm, model) == [honest]


async def _call(function, *arguments):
    function(*arguments)


@pytest.mark.long
def test_server_that_is_wrong_at_times_is_doubted_and_left(checkpoint):
    def others():
        for blocks in ("0:3", "3:6"):
            swarm.serve(blocks)

    with inprocess(checkpoint, "0:2", "4:6") as swarm, audited(swarm) as model:
        model.backend.membership.router.limits = RouterLimits(survey_fresh_s=0.0, survey_age_s=0.0)
        liar = swarm.serve("2:4", lie=is_off_at_times)
        generate(model, After(3, others))
        assert (model.audits.disputed, model.audits.wrong) == (1, ())
        avoided = model.backend.membership.sessions.avoidance.processes
        assert any(process.startswith(liar.me.identity.peer_id) for process in avoided)


def test_nothing_is_taken_from_a_wrong_server_though_there_is_no_other(checkpoint):
    with inprocess(checkpoint) as swarm, audited(swarm) as model:
        liar = swarm.serve("0:6", lie=leaves_a_block_out)
        model.generate(ONE, **settings())
        model.backend.membership.sessions.avoidance.ban(liar.me.identity.peer_id)
        with pytest.raises(NoRoute, match="others contradict"):
            model.generate(ONE, **settings())
