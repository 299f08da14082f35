"""Training a draft head on the model's final states, so that it can stop and go on at any step."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from swarm.client.distilling.loss import foreseen
from swarm.client.distilling.muon import Muon
from swarm.client.distilling.work import Plan, States
from swarm.errors import BadConfiguration
from swarm.model.drafthead import DraftHead


@dataclass(frozen=True, slots=True)
class Ends:
    """The model's embeddings and head: as modules, with hidden states behind the model's last norm."""

    embeddings: nn.Module
    to_logits: nn.Module

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return next(self.to_logits.parameters()).device

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings in float32."""
        embedded: Tensor = self.embeddings(tokens.to(self.device))
        return embedded.float()

    def logits(self, states: Tensor) -> Tensor:
        """Return the model's logits of float32 states, in float32."""
        dtype = next(self.to_logits.parameters()).dtype
        logits: Tensor = self.to_logits(states.to(dtype))
        return logits.float()


class Training:
    """A head that learns, one step after the other. The same plan always takes the same windows."""

    def __init__(self, plan: Plan, ends: Ends, logits_max: int) -> None:
        """logits_max: so many logits are compared in a step, of some positions only where there are more."""
        torch.manual_seed(plan.seed)
        self.head = DraftHead(plan.shape).to(ends.device)
        self.step = 0
        self._plan, self._ends, self._logits_max = plan, ends, logits_max
        weights = list(self.head.parameters())
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": Muon([each for each in weights if each.ndim == 2]),
            "adamw": torch.optim.AdamW([each for each in weights if each.ndim == 1], betas=(0.9, 0.95), weight_decay=0),
        }

    def learn(self, tokens: Tensor, states: States, usable: int) -> float:
        """Take a step on some of the first `usable` windows. Returns its loss.

        tokens: int32 [windows, positions], of all windows.
        """
        plan = self._plan
        which = chosen(self.step, plan.rows, usable, plan.seed)
        for group in (group for each in self._optimizers.values() for group in each.param_groups):
            group["lr"] = plan.learning_rate * schedule(self.step, plan.steps)
        depths = 1 if self.step < plan.alone * plan.steps else plan.depths
        with torch.autocast(self._ends.device.type, torch.bfloat16, enabled=plan.autocast):
            loss = self._loss(tokens[which].long(), states.of(which).to(self._ends.device).float(), depths)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for each in self._optimizers.values():
            each.step()
            each.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def _loss(self, tokens: Tensor, states: Tensor, depths: int) -> Tensor:
        """Return the mean over so many depths: cross-entropy with the model's own tokens, and the states' distance.

        The latter is the mean square of their difference in shares of the model's own. It keeps states like the
        model's, which the head takes in their place at the next depth.
        """
        wanted, embedded = states[:, 1:], self._ends.embed(tokens[:, 1:])
        places = self._places(*wanted.shape[:2])
        with torch.no_grad():
            likely = torch.softmax(self._ends.logits(wanted[:, places]), dim=-1)
        losses = []
        for depth, found in enumerate(foreseen(self.head, states[:, :-1], embedded, depths)):
            guessed = torch.log_softmax(self._ends.logits(found[:, places]), dim=-1)
            losses.append(-(likely * guessed).sum(-1)[:, places >= depth].mean())
            far = (found.float() - wanted)[:, depth:].square().mean()
            losses.append(far / wanted.square().mean())
        return torch.stack(losses).sum() / depths

    def _places(self, rows: int, entries: int) -> Tensor:
        """Return the entries of which logits are compared, in order. Early ones are of no depth but the first."""
        vocabulary = self._plan.vocabulary
        most = max(1, self._logits_max // (rows * vocabulary))
        if most >= entries:
            return torch.arange(entries)
        drawn = torch.Generator().manual_seed(self._plan.seed + self.step)
        first = self._plan.depths - 1
        return first + torch.randperm(entries - first, generator=drawn)[:most].sort().values

    @torch.no_grad()
    def right(self, tokens: Tensor, states: States, which: Tensor, depths: int) -> list[float]:
        """Return how often the head's likeliest token is the model's, of each depth, in some windows."""
        hits = torch.zeros(depths, 2)
        for part in which.split(self._plan.rows):
            ids, known = tokens[part].long(), states.of(part).to(self._ends.device).float()
            places = self._places(len(part), known.shape[1] - 1)
            wanted = self._ends.logits(known[:, 1:][:, places]).argmax(-1)
            found = foreseen(self.head, known[:, :-1], self._ends.embed(ids[:, 1:]), depths)
            for depth, state in enumerate(found):
                same = (self._ends.logits(state[:, places]).argmax(-1) == wanted)[:, places >= depth]
                hits[depth] += torch.tensor([float(same.sum()), float(same.numel())])
        return (hits[:, 0] / hits[:, 1]).tolist()

    def save(self, path: Path) -> None:
        """Keep the state, in one step. Raises OSError."""
        kept = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        for kind, optimizer in self._optimizers.items():
            for number, state in optimizer.state_dict()["state"].items():
                kept |= {f"{kind}.{number}.{name}": tensor for name, tensor in state.items()}
        partial = path.with_name(f".{path.name}")
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, partial, {"step": str(self.step)})
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a state. Raises BadConfiguration where it does not fit."""
        try:
            with safe_open(path, "pt") as file:
                step = int(file.metadata()["step"])
                kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
            self.head.load_state_dict(_below("head.", kept))
            for kind, optimizer in self._optimizers.items():
                numbers = range(len(optimizer.param_groups[0]["params"]))
                state = {number: _below(f"{kind}.{number}.", kept) for number in numbers}
                optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
            why = f"{str(path)!r} does not load: {str(error).splitlines()[0][:200]}; delete it to train anew"
            raise BadConfiguration("out", why) from None
        self.step = step


def chosen(step: int, rows: int, usable: int, seed: int) -> Tensor:
    """Return the windows of a step: all are taken, in an order that changes, before one is taken again."""
    first = step * rows
    rounds = range(first // usable, (first + rows - 1) // usable + 1)
    orders = [torch.randperm(usable, generator=torch.Generator().manual_seed(seed + each)) for each in rounds]
    begin = first - rounds.start * usable
    return torch.cat(orders)[begin : begin + rows]


def schedule(step: int, steps: int) -> float:
    """The learning rate of a step as a share of its peak: warm-up, and cosine decay to a fiftieth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _below(prefix: str, kept: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in kept.items() if name.startswith(prefix)}
