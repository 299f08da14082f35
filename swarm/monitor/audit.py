"""Audits the servers of a swarm for the health page. A process of its own: it needs torch and hivemind.

`python -m swarm.monitor.audit --every 300 --share 0.02 --initial-peers ... MODEL...` prints one JSON object for each
audit, and reads the servers that it may audit from its standard input; see `swarm.monitor.auditing`.

Each audit joins the swarm as a new client, with an identity of its own, since servers must not know an auditor by its
id. Of each model it loads embeddings and head alone.
"""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import structlog
import torch
from pydantic import ValidationError
from torch import Tensor

from swarm.access import Access
from swarm.client.auditing.docket import Findings
from swarm.client.auditing.evidence import Folder
from swarm.client.auditing.passages import Passages
from swarm.client.auditing.patrol import Patrol
from swarm.client.planning.router import Wanted
from swarm.client.session.membership import joined
from swarm.commands import Stop, run_click, run_until_stopped
from swarm.dht.reading import open_directory
from swarm.errors import SwarmError, UnsupportedCheckpoint
from swarm.identity import Identity
from swarm.model.checkpoint import open_checkpoint
from swarm.model.loading import load_ends
from swarm.model.tokens import TokenEnds
from swarm.monitor.allowance import Allowance, AllowanceLimits
from swarm.monitor.auditing import AuditingLimits, AuditLine, Orders
from swarm.options import LOG_LEVELS, NETWORK, Number, access_options, split_peers
from swarm.protocol.messages import POSITIONS_MAX

_log = structlog.get_logger("swarm.audits")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditArguments:
    """The arguments of the process."""

    models: tuple[str, ...]
    every_s: float
    share: float
    evidence: Path | None
    initial_peers: tuple[str, ...]
    network: str
    network_key: Path | None
    allow_peers: Path | None
    identity: Path | None


class Told:
    """The latest orders. A thread reads them; `begun` is set with the first ones."""

    def __init__(self) -> None:
        self.orders = Orders(answering=(), left_out=())
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            try:
                self.orders = Orders.model_validate_json(line)
            except ValidationError:
                continue
            self._loop.call_soon_threadsafe(self.begun.set)


def load_patrol(model: str, draws: random.Random, evidence: Path | None = None) -> tuple[str, Patrol]:
    """Load a model's ends. Returns its root, and what audits its servers. Raises UsageError or CheckpointError.

    evidence: folder for what shows servers as wrong.
    """
    checkpoint = open_checkpoint(model)
    ends = TokenEnds(load_ends(checkpoint), checkpoint.traits)
    try:
        tokenizer = checkpoint.texts().tokenizer()
        tokenize = partial(_ids, tokenizer)
    except UnsupportedCheckpoint:
        tokenize = None
    passages = Passages(tokenize, ends.vocabulary, draws)

    def text(positions: int) -> Tensor:
        return ends.embed(torch.tensor([passages.ids(positions)]), 0)

    wanted = Wanted(checkpoint.root, checkpoint.public_name, checkpoint.n_blocks, None)
    keep = None if evidence is None else Folder(evidence).keep
    positions_max = min(checkpoint.traits.positions_max or POSITIONS_MAX, POSITIONS_MAX)
    return checkpoint.root, Patrol(wanted, text, positions_max, draws=draws, evidence=keep)


def _ids(tokenizer: Any, text: str) -> Sequence[int]:  # noqa: ANN401 - transformers' own class
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


async def audit_forever(arguments: AuditArguments, _: Stop) -> None:
    """Audit servers that are drawn, until cancelled. Raises UsageError or CheckpointError."""
    draws, told = random.SystemRandom(), Told()
    patrols = [await asyncio.to_thread(load_patrol, model, draws, arguments.evidence) for model in arguments.models]
    allowance = Allowance(time.monotonic(), AllowanceLimits(share=arguments.share))
    await told.begun.wait()
    while True:
        began = time.monotonic()
        root, patrol = draws.choice(patrols)
        findings = await audited(patrol, arguments, told.orders)
        now = time.monotonic()
        allowance.spent(findings.took_s, now)
        print(line_of(root, findings, patrol.doubted).model_dump_json(), flush=True)
        planned_s = draws.uniform(0.5, 1.5) * arguments.every_s - (now - began)
        await asyncio.sleep(max(planned_s, allowance.wait_s(now)))


async def audited(patrol: Patrol, arguments: AuditArguments, orders: Orders) -> Findings:
    """Audit one server, as a client that joins for it and leaves."""
    path = arguments.identity
    me = Identity.generate() if path is None else Identity.load_or_create(path)
    began = time.monotonic()
    try:
        access = Access.load(arguments.network_key, arguments.allow_peers)
        join = partial(open_directory, arguments.network, arguments.initial_peers, access)
        async with joined(join, me, network=arguments.network, access=access) as member:
            began = time.monotonic()
            found = await patrol.audit(member, orders.answering, orders.left_out)
            return replace(found, took_s=time.monotonic() - began)
    except SwarmError as error:
        return Findings(why=str(error), took_s=time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 - no server may end the auditor, which remembers the others
        _log.exception("an audit has failed")
        return Findings(why=f"an audit has failed: {type(error).__name__}", took_s=time.monotonic() - began)


def line_of(root: str, findings: Findings, doubted: frozenset[str]) -> AuditLine:
    """Return the line about one audit. doubted: all that are in doubt."""

    def told(peers: frozenset[str]) -> tuple[str, ...]:
        return tuple(sorted(peers)[: AuditingLimits().servers_max])

    return AuditLine(
        root=root,
        at=time.time(),
        took_s=findings.took_s,
        agreed=told(findings.agreed),
        disputed=told(findings.doubted),
        wrong=told(findings.wrong),
        doubted=told(doubted),
        why=findings.why[:200],
    )


@click.command("audit")
@click.argument("models", nargs=-1, required=True)
@click.option("--every", type=Number(1.0), required=True, help="seconds, on average")
@click.option("--share", type=Number(0.0, 1.0, min_open=True), required=True, help="of the time")
@click.option("--evidence", type=click.Path(path_type=Path), default=None, help="folder for files of it")
@click.option("--initial-peers", multiple=True, callback=split_peers)
@click.option("--network", type=NETWORK, default="public")
@access_options
@click.option("--identity", type=click.Path(path_type=Path), default=None)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning")
def command(
    models: tuple[str, ...],
    every: float,
    log_level: str,
    **joining: Any,  # noqa: ANN401 - as AuditArguments has them
) -> None:
    """Audit servers of the swarm again and again; print what was found."""
    torch.set_num_threads(1)
    arguments = AuditArguments(models=models, every_s=every, **joining)
    run_until_stopped(partial(audit_forever, arguments), log_level)


if __name__ == "__main__":
    run_click(command)
