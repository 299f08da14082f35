"""`AutoDistributedModel.from_pretrained`: a `transformers` model whose blocks are all over the world."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import structlog
import torch
from transformers import PreTrainedModel

from swarm.access import Access
from swarm.blocks import Blocks
from swarm.client.auditing.auditor import AuditLimits
from swarm.client.hf.drafting import drafting_by, drafting_by_head, drafting_by_mtp, load_draft
from swarm.client.hf.head import HeadMode, prepare_head
from swarm.client.hf.lead import Drafting
from swarm.client.hf.local import LocalFirst
from swarm.client.hf.model import DistributedModel, distribute
from swarm.client.hf.runtime import LoopThread
from swarm.client.hf.swarm import ClientOptions, Swarm
from swarm.client.planning.preferences import Preferences, Quality
from swarm.client.planning.route import Optimize
from swarm.client.speculation.drafts import Lookup
from swarm.config import Settings, Way, load_settings
from swarm.dht.reading import chosen, open_directory
from swarm.errors import BadConfiguration
from swarm.events import configure_events
from swarm.identity import Identity
from swarm.model.checkpoint import Checkpoint, open_checkpoint
from swarm.model.draftfiles import is_draft
from swarm.model.loading import load_ends, load_span
from swarm.model.quantising import quantisation_for
from swarm.net.lan import ways_in
from swarm.protocol.tensors import Coding, coding_of


class AutoDistributedModel:
    """Makes distributed models. Not to be instantiated, as the Auto classes of `transformers` are not."""

    def __init__(self) -> None:
        raise TypeError("use AutoDistributedModel.from_pretrained(...)")

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        initial_peers: Iterable[str] | None = None,
        revision: str | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        token: str | None = None,
        cache_dir: str | Path | None = None,
        root: str | None = None,
        network: str | None = None,
        network_key: str | Path | None = None,
        allow_peers: str | Path | None = None,
        lan: bool | None = None,
        identity: str | Path | None = None,
        directory: Way | None = None,
        local_blocks: int = 0,
        quantize: str = "none",
        step_timeout_s: float = 120.0,
        wait_for_blocks_s: float = 0.0,
        allowed_peers: Iterable[str] | None = None,
        blocked_peers: Iterable[str] = (),
        trusted_peers: Mapping[str, Iterable[str]] | None = None,
        optimize: Optimize = "latency",
        quality: Quality = "full",
        exact: bool = False,
        wire: Coding | None = None,
        draft: str | Path | PreTrainedModel = "lookup",
        audit: float = 0.02,
        head: HeadMode = "exact",
    ) -> DistributedModel:
        """Load embeddings, final norm and head of a model, and join the swarm that serves its blocks.

        model: a hub id or a local directory. initial_peers: multiaddrs of nodes to join through. Where they, revision,
        cache_dir, network, network_key, allow_peers, lan, identity or directory are left out they come from SWARM_* or
        swarm.toml. lan: without initial peers, look for servers of the swarm on this network, for two seconds at most.
        dtype: of embeddings and head, and of all servers. "auto": the checkpoint's, and servers may compute in others.
        device: of embeddings, head and local blocks. token: of the hub, for private or gated repositories.
        root: the checkpoint's, if it must be this one; or its pin (`model.checkpoint.pin`), which names tokenizer and
        chat template as well. network_key: key file of a private swarm. allow_peers: file with the ids of all peers
        that this client deals with. identity: key file; by default a fresh identity for this model, which is on no
        server's list. directory: how to read the servers' records. "light" needs no p2pd, and
        the extra `light`; "auto" takes p2pd where it is installed.
        local_blocks: run so many of the first blocks here, so that no server sees their input. It raises the price
        of reading the prompt from activations; it does not prevent it (SECURITY.md). quantize: of their weights, as
        `swarm-serve --quantize`: "none", "int8", "int4" or "auto". The servers' weights do not depend on it.
        step_timeout_s: the longest that one step may take, or one chunk of a long prompt, repairs included; a day at
        most. wait_for_blocks_s: how long to wait for a server of blocks that no server has.
        allowed_peers, blocked_peers: peer ids of servers; only the former, never the latter are used. That holds for
        repairs, which fail rather than leave them. trusted_peers: the same for ranges of blocks, such as
        {"0:4": [peer_id]}: these blocks go to these peers alone. optimize: "latency" for the least time per token,
        "throughput" for the route whose slowest server is fastest, for batches.
        quality: "full" uses servers whose numbers are as close to float32's as bfloat16's are, int8 weights among
        them. "any" takes servers of fewer bits, too, if those make the better route. A route never mixes the two.
        exact: all servers of a route, and those that take over from them, compute in one numeric class, in `dtype`.
        `exactness` says what a route promises. wire: "int8" sends activations in 8.5
        bits a number, for slow connections. It rounds them, so the text may differ from that of a plain run; only
        servers with `--wire int8` are used. draft: where guesses of the next tokens
        come from, which travel ahead of the text: "lookup" in the text itself, "mtp" for the checkpoint's own blocks
        that predict more than one token, "none", a folder that `swarm-draft` made, or a small model of the same
        vocabulary: itself, a hub id or a directory. They change the time alone (docs/speculation.md).
        audit: the share of sessions that other servers
        compute once more after their end, to find servers that compute wrongly (docs/audits.md); 0 for none.
        head: "auto" has `generate()` choose tokens by a copy of the head in 8 bits, where that proves the exact head's
        token. It takes half as much memory again. "int8" has embeddings and head in 8 bits alone, which takes half of
        the memory, and may change tokens (docs/head.md).

        Returns an instance of the model's own class. It is a context manager, and has `route`, `exactness`, `blocks`,
        `inference_session` and `close` beside the methods of `transformers`.
        Raises UsageError, CheckpointError or NetworkError; NoRoute comes with the first step.
        """
        if head not in get_args(HeadMode):
            raise BadConfiguration("head", f'{head!r}; it is "exact", "auto" or "int8"')
        preferences = Preferences.checked(allowed_peers, blocked_peers, optimize, trusted_peers, quality, exact=exact)
        coding = _coding(wire)
        settings = _settings(
            initial_peers=None if initial_peers is None else tuple(initial_peers),
            revision=revision or None,
            network=network or None,
            cache_dir=_path(cache_dir),
            network_key=_path(network_key),
            allow_peers=_path(allow_peers),
            lan=lan,
            identity=_path(identity),
            directory=directory,
        )
        name = model if model is not None else settings.model
        if name is None:
            raise BadConfiguration("model", "say which, or set SWARM_MODEL")
        way = chosen(settings.directory)
        access = Access.load(settings.network_key, settings.allow_peers)
        settings = settings.model_copy(update={"initial_peers": _ways_in(settings, access)})
        options = ClientOptions(
            settings.network,
            step_timeout_s,
            wait_for_blocks_s,
            preferences,
            local_blocks,
            access,
            coding=coding,
            audits=AuditLimits(share=audit),
        )
        checkpoint = open_checkpoint(
            name, revision=settings.revision, token=token, cache_dir=settings.cache_dir, root=root
        )
        _check_blocks(checkpoint, options)
        weights = _local_weights(quantize, checkpoint, local_blocks, device)
        ends = load_ends(checkpoint, dtype=dtype, device=device)
        prepare_head(ends, checkpoint.traits, head)
        mtp = partial(drafting_by_mtp, checkpoint, ends)
        drafting = _drafting(draft, checkpoint, ends, token=token, cache_dir=settings.cache_dir, device=device)
        first = partial(load_span, dtype=dtype, device=device, quantize=weights)
        local = first(checkpoint, Blocks(0, local_blocks)) if local_blocks else None
        me = Identity.load_or_create(settings.identity) if settings.identity is not None else Identity.generate()
        join = partial(open_directory, settings.network, settings.initial_peers, access, way)
        if exact or dtype != "auto":
            options = replace(options, dtype=str(ends.dtype).removeprefix("torch."))
        swarm = Swarm(checkpoint, ends.dtype, join, me, options)
        backend = swarm if local is None else LocalFirst(local, swarm)
        return distribute(ends, checkpoint, backend, drafting, mtp)


AutoDistributedModelForCausalLM = AutoDistributedModel


def _settings(**given: object) -> Settings:
    """Return the settings of the environment and the files, with what the caller passes (not None) over them."""
    settings = load_settings()
    if not structlog.is_configured():  # in a notebook; a command or an application has its own way
        configure_events(settings.log_level or "warning")
    return settings.model_copy(update={name: value for name, value in given.items() if value is not None})


def _ways_in(settings: Settings, access: Access) -> tuple[str, ...]:
    """Return the nodes to join through, before anything is loaded. Raises BadConfiguration."""
    if settings.initial_peers:
        return settings.initial_peers
    loop = LoopThread()
    try:
        return loop.run(ways_in((), settings.network, access, lan=settings.lan))
    finally:
        loop.stop()


def _coding(wire: str | None) -> Coding | None:
    try:
        return coding_of(wire or "")
    except ValueError as error:
        raise BadConfiguration("wire", str(error)) from None


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _drafting(
    draft: str | Path | PreTrainedModel,
    checkpoint: Checkpoint,
    ends: PreTrainedModel,
    *,
    device: torch.device | str,
    **hub: str | Path | None,
) -> Drafting | None:
    """Return where guesses come from. Raises BadConfiguration, ModelNotFound, or as `load_mtp` does."""
    match draft:
        case "none":
            return None
        case "lookup":
            return Drafting(Lookup)
        case "mtp":
            return drafting_by_mtp(checkpoint, ends)
        case PreTrainedModel():
            small = draft
        case _ if is_draft(Path(draft)):
            return drafting_by_head(Path(draft), checkpoint, ends)
        case _:
            small = load_draft(draft, device=device, **hub)
    return drafting_by(small, ends.name_or_path or "", ends.config.get_text_config(decoder=True).vocab_size)


def _local_weights(quantize: str, checkpoint: Checkpoint, count: int, device: torch.device | str) -> str | None:
    """Return what the weights of so many local blocks become. Raises BadConfiguration."""
    if quantize != "none" and not count:
        raise BadConfiguration("quantize", "it is of local_blocks, and there are none")
    return quantisation_for(quantize, checkpoint, torch.device(device)).weights


def _check_blocks(checkpoint: Checkpoint, options: ClientOptions) -> None:
    """Raise UsageError where the options name blocks that the model does not have."""
    for blocks, _ in options.preferences.trusted_peers:
        checkpoint.check(blocks)
    if not 0 <= options.local_blocks < checkpoint.n_blocks:
        raise BadConfiguration("local_blocks", f"{options.local_blocks}; the model has {checkpoint.n_blocks} blocks")
