"""Generations that go on whatever happens, each client's in a thread, each compared with what the local model says."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from swarm.client.hf.model import DistributedModel
from swarm.client.hf.swarm import Swarm
from swarm.client.session import session
from swarm.errors import SwarmError

MARGIN_MIN = 0.01  # in a prompt's continuation no second-best token comes closer: no order of sums can swap the two


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and what the local model makes of it. prompt: [1, tokens], expected: [1, tokens + new tokens]."""

    prompt: Tensor
    expected: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One token of one generation. Peers are those of the route before and after it; seconds are since the epoch."""

    client: int
    ended: float
    took_s: float
    repairs: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(slots=True)
class Generation:
    """One call of `generate()`. error is why it failed; wrong counts its tokens that are not the local model's."""

    client: int
    began: float
    first_s: float | None = None  # to the first token
    ended: float = 0.0
    steps: list[Step] = field(default_factory=list)
    wrong: int = 0
    error: str | None = None

    @property
    def completed(self) -> bool:
        """Whether all tokens came."""
        return self.error is None


class Observed(Swarm):
    """A client that tells about its session."""

    @property
    def session(self) -> session.Session | None:
        """The latest one."""
        return self._latest

    @classmethod
    def take_over(cls, swarm: Swarm) -> "Observed":
        """Turn a client that has joined into one of these."""
        swarm.__class__ = cls
        assert isinstance(swarm, cls)
        return swarm


def make_cases(model: PreTrainedModel, count: int, prompt_tokens: int, new_tokens: int, seed: int) -> list[Case]:
    """Cut prompts out of Python's standard library and continue them; near-ties are left out."""
    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    source = Path(threading.__file__).parent
    text = "".join((source / name).read_text() for name in ("argparse.py", "tarfile.py", "subprocess.py"))
    tokens = tokenizer(text, return_tensors="pt").input_ids
    random = torch.Generator().manual_seed(seed)
    cases: list[Case] = []
    while len(cases) < count:
        start = int(torch.randint(tokens.shape[1] - prompt_tokens, (1,), generator=random))
        prompt = tokens[:, start : start + prompt_tokens]
        options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        made = model.generate(prompt, **options, output_scores=True, return_dict_in_generate=True)
        best = torch.stack(made.scores).topk(2).values  # [new tokens, 1, 2]
        if float((best[..., 0] - best[..., 1]).min()) >= MARGIN_MIN:
            cases.append(Case(prompt, made.sequences))
    return cases


class Client:
    """Generates one case after the other, in a thread, until told to stop. The current generation is always ended."""

    def __init__(self, number: int, model: DistributedModel, cases: Sequence[Case], token_s: float) -> None:
        """token_s: a pause after every token, as a wide-area route would take it."""
        self.generations: list[Generation] = []
        self.crash: BaseException | None = None
        self._number = number
        self._model = model
        self._swarm = Observed.take_over(model.backend)
        self._cases = cases
        self._token_s = token_s
        self._stopping = threading.Event()
        self._current = Generation(number, time.time())
        self._thread = threading.Thread(target=self._run, name=f"client-{number}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopping.set()

    @property
    def alive(self) -> bool:
        """Whether its last generation has not ended yet."""
        return self._thread.is_alive()

    def peers(self) -> tuple[str, ...]:
        """The peers of the session that is open now."""
        return self._peers() if self._current.first_s is not None else ()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._generate(self._cases[len(self.generations) % len(self._cases)])
        except BaseException as crash:  # noqa: BLE001 - the main thread raises it
            self.crash = crash

    def _generate(self, case: Case) -> None:
        self._current = made = Generation(self._number, time.time())
        new_tokens = case.expected.shape[1] - case.prompt.shape[1]
        options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        try:
            tokens = self._model.generate(case.prompt, **options, streamer=Stopwatch(self, made))
            wrong = tokens != case.expected
            made.wrong = int(wrong.sum())
        except SwarmError as error:
            made.error = f"{type(error).__name__}: {error}"
        made.ended = time.time()
        self.generations.append(made)

    def _peers(self) -> tuple[str, ...]:
        live = self._swarm.session
        return () if live is None else tuple(hop.peer_id for hop in live.route)

    def _repairs(self) -> int:
        live = self._swarm.session
        return 0 if live is None else live.repairs


class Stopwatch:
    """A streamer of `generate()` that notes when tokens come and along which route, and takes its time."""

    def __init__(self, client: Client, made: Generation) -> None:
        self._client = client
        self._made = made
        self._puts = 0
        self._resumed = time.perf_counter()
        self._before: tuple[str, ...] = ()
        self._repairs = 0

    def put(self, tokens: Tensor) -> None:
        """First the prompt comes, then every token."""
        del tokens
        took_s = time.perf_counter() - self._resumed
        self._puts += 1
        if self._puts == 1:
            self._resumed = time.perf_counter()
            return
        client = self._client
        peers, repairs = client._peers(), client._repairs()
        if self._puts == 2:
            self._made.first_s = took_s
        else:
            step = Step(client._number, time.time(), took_s, repairs - self._repairs, self._before, peers)
            self._made.steps.append(step)
        self._before, self._repairs = peers, repairs
        time.sleep(client._token_s)
        self._resumed = time.perf_counter()

    def end(self) -> None:
        """Nothing to flush."""
