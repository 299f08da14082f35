"""`swarm-demo`: a whole swarm on this machine, in a minute, from nothing."""

import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm.commands import configure_logging, run_click
from swarm.demo.local import LocalSwarm
from swarm.errors import SwarmError
from swarm.options import HOST_PORT, LOG_LEVELS, Number
from swarm.version import __version__

if TYPE_CHECKING:
    from swarm.client.hf.model import DistributedModel

CHECKPOINT = Path(__file__).parent / "checkpoint"
SPANS = ("0:4", "4:8", "8:12", "4:8")  # two hold the middle: one of them is killed
PROMPT = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a file."""
'''


@click.command("swarm-demo")
@click.version_option(__version__)
@click.option("--prompt", default=PROMPT, help="the start of some Python code")
@click.option("--max-new-tokens", type=click.IntRange(1, 400), default=96, show_default=True)
@click.option(
    "--delay-ms",
    type=Number(0.0, 1000.0, min_open=True),
    default=None,
    help="put servers so far apart, one way, and compare generating with guesses that travel ahead and without",
)
@click.option("--gateway", is_flag=True, help="serve the swarm over HTTP until Ctrl-C, in the place of a generation")
@click.option("--listen", type=HOST_PORT, default="127.0.0.1:8000", show_default=True, help="of the gateway")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning", show_default=True)
def command(
    prompt: str,
    max_new_tokens: int,
    delay_ms: float | None,
    gateway: bool,
    listen: tuple[str, int],
    log_level: str,
) -> None:
    """Start a bootstrap node and four servers of a small checkpoint on this machine, and generate through them.

    Half-way a server is killed, and another takes over. With --gateway, the swarm is served over HTTP instead. With
    --delay-ms, three servers are as far apart as in the world, and the same text comes twice: one token a trip, and
    with guesses. The checkpoint comes with the package; nothing is downloaded, and nothing is left running.
    """
    if gateway and delay_ms is not None:
        raise click.UsageError("--delay-ms compares two generations, and --gateway makes none: give one of them")
    configure_logging(log_level)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes below are ended in order
    began = time.monotonic()
    if delay_ms is not None:
        _compare(prompt, max_new_tokens, delay_ms)
        return
    # In float32, because in bfloat16 two tokens may be equally likely, and which one wins depends on the order of sums.
    options = ("--dtype", "float32")
    with LocalSwarm(CHECKPOINT, SPANS, options=options, on_start=_tell_start) as swarm:
        click.echo(f"up after {time.monotonic() - began:.1f} s: blocks {', '.join(SPANS)} on four servers\n")
        if gateway:
            _serve(swarm, *listen)
            return
        _generate(swarm, prompt, max_new_tokens)
    click.echo(how_to_go_on(Path(sys.executable).parent))


def _generate(swarm: LocalSwarm, prompt: str, max_new_tokens: int) -> None:
    """Stream a completion through the swarm, then say how it went."""
    from swarm.client.hf.auto import AutoDistributedModel  # noqa: PLC0415 - torch: while the servers load theirs
    from swarm.client.hf.text import TextOptions, continue_prompt  # noqa: PLC0415
    from swarm.demo.streaming import TimedStreamer, local_model  # noqa: PLC0415
    from swarm.model.checkpoint import open_checkpoint  # noqa: PLC0415

    options = TextOptions(max_new_tokens=max_new_tokens, temperature=0.0, top_p=1.0, seed=None, chat=False)
    tokenizer = open_checkpoint(CHECKPOINT).texts().tokenizer()
    with AutoDistributedModel.from_pretrained(
        CHECKPOINT, initial_peers=swarm.initial_peers, network=swarm.network, dtype="float32"
    ) as model:
        streamer = TimedStreamer(tokenizer, half_way=max_new_tokens // 2, then=lambda: _kill_the_middle(swarm, model))
        tokens = continue_prompt(model, tokenizer, prompt, options, streamer)
        click.echo("\nroute at the end:")
        for hop in model.route:
            click.echo(f"  blocks {hop.blocks!s:6} {hop.peer_id}  {hop.latency_ms:.1f} ms away")
    click.echo(
        f"time to first token {1000 * streamer.first_s:.0f} ms, {streamer.tokens_per_s:.1f} tokens per second; "
        f"the token after the kill took {1000 * streamer.longest_s:.0f} ms"
    )
    expected = continue_prompt(local_model(CHECKPOINT), tokenizer, prompt, options)
    if tokens.tolist() != expected.tolist():
        raise SwarmError("the swarm's tokens differ from the local model's")
    click.echo(f"the local model gives the same {tokens.shape[1]} tokens")


def _tell_start(name: str) -> None:
    click.echo(f"starting {name}")


def _compare(prompt: str, max_new_tokens: int, delay_ms: float) -> None:
    """Generate the same text without guesses and with them, on a route of three servers that are far apart."""
    from swarm.client.hf.auto import AutoDistributedModel  # noqa: PLC0415 - torch: while the servers load theirs
    from swarm.client.hf.text import TextOptions, continue_prompt  # noqa: PLC0415
    from swarm.demo.distance import far_apart  # noqa: PLC0415
    from swarm.demo.streaming import TimedStreamer  # noqa: PLC0415
    from swarm.model.checkpoint import open_checkpoint  # noqa: PLC0415

    options = TextOptions(max_new_tokens=max_new_tokens, temperature=0.0, top_p=1.0, seed=None, chat=False)
    tokenizer = open_checkpoint(CHECKPOINT).texts().tokenizer()
    speeds, texts = [], []
    ours = CHECKPOINT.parent / "draft"
    with LocalSwarm(CHECKPOINT, log_level="warning", on_start=_tell_start) as swarm:
        report = swarm.folder / "late.json"
        with far_apart(swarm, ("0:4", "4:8", "8:12"), delay_ms, report, ("--dtype", "float32")):
            for draft, title in (("none", "one token a trip"), (ours, "with guesses that travel ahead")):
                click.echo(f"\n{title}, {delay_ms:g} ms from peer to peer:\n")
                with AutoDistributedModel.from_pretrained(
                    CHECKPOINT, initial_peers=swarm.initial_peers, network=swarm.network, dtype="float32", draft=draft
                ) as model:
                    streamer = TimedStreamer(tokenizer, half_way=max_new_tokens, then=lambda: None)
                    texts.append(continue_prompt(model, tokenizer, prompt, options, streamer).tolist())
                    speeds.append(streamer.tokens_per_s)
                    counts = model.last_speculation
    if texts[0] != texts[1]:
        raise SwarmError("the tokens with guesses differ from those without")
    right = f"; {counts.right} of {counts.right + counts.wrong} guesses were right" if counts is not None else ""
    click.echo(
        f"\nthe same text: {speeds[0]:.1f} and {speeds[1]:.1f} tokens a second, "
        f"{speeds[1] / speeds[0]:.1f} times as fast{right}"
    )


def _serve(swarm: LocalSwarm, host: str, port: int) -> None:
    """Serve the swarm over HTTP until a signal comes."""
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    url = swarm.start_gateway("--dtype", "float32", listen=at).wait_ready().ready["url"]
    click.echo(f"\nthe gateway is at {url} (Ctrl-C ends it). Continue some code:\n")
    click.echo(f"  curl {url}/v1/completions -H 'Content-Type: application/json' \\")
    body = json.dumps({"model": CHECKPOINT.name, "prompt": "def read_lines(path):", "max_tokens": 48})
    click.echo(f"    -d '{body}'")
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    click.echo("ending the swarm")


def how_to_go_on(folder: Path) -> str:
    """Return one line that says how to start a swarm of one's own. folder: of this environment's commands."""
    names = ("swarm-bootstrap", "swarm-serve")
    start, serve = (str(folder / name) if (folder / name).exists() else name for name in names)
    return (
        f"to start a swarm of your own: {start} --listen 127.0.0.1:31337, and in another terminal "
        f"{serve} {CHECKPOINT} --initial-peers ADDRESS, with the address that the first one prints"
    )


def _kill_the_middle(swarm: LocalSwarm, model: "DistributedModel") -> None:
    """Kill (SIGKILL) the server that the middle of the route runs through."""
    peer = model.route[1].peer_id
    next(server for server in swarm.servers if server.ready["peer_id"] == peer).kill()


def main() -> None:
    """Run the command."""
    run_click(command)


if __name__ == "__main__":
    main()
