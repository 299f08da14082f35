"""A session that goes ahead of its caller: guesses of the next tokens travel before the caller asks for them.

`generate()` and hand-written loops feed one token after the other, as ever. If the token is the one that was guessed,
its output is on the way, or here already. If not, the route takes back the wrong guesses. So the caller alone decides
about tokens, by its processors, sampling, random numbers, streamers and stopping. They are the same without guesses.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from swarm.activations import Activations
from swarm.client.hf.lead import Drafting, Embed, Lead, RemoteSession
from swarm.client.speculation.limits import AheadLimits
from swarm.client.speculation.pace import pays
from swarm.client.speculation.pipe import Counts


class AheadSession:
    """Steps of one session, with guesses ahead of them where they help."""

    def __init__(
        self, session: RemoteSession, embed: Embed, most: int, positions_max: int, limits: AheadLimits | None = None
    ) -> None:
        """most: tokens that may be taken back at a time, or 0."""
        self._session = session
        self._embed = embed
        self._limits = limits or AheadLimits()
        self._lead = Lead(session, embed, min(most, self._limits.tokens_max), positions_max, self._limits)
        self._can_guess = most > 0
        self._unread: list[tuple[int, list[int] | None]] = []  # steps that are not in the lead's text: keep, and ids
        self._has_led = False  # since the last step that did not come through the lead
        self._embeds: bool | None = None  # whether tokens can be embedded ahead; None where it was not tried

    @property
    def counts(self) -> Counts:
        """The fate of guesses, counted."""
        return self._lead.counts

    def step(
        self,
        activations: Activations,
        *,
        keep: int,
        rows: Sequence[int] | None,
        want: int,
        ids: Tensor | None = None,
        drafting: Drafting | None = None,
        processors: LogitsProcessorList | None = None,
    ) -> Tensor:
        """As `RemoteSession.step`. ids: the tokens of these activations, int64 [rows, tokens], where they are known.

        drafting: None for no guesses. processors: of a caller that samples.
        """
        is_plain = rows is None and activations.positions is None and activations.mask is None
        text = ids if is_plain and activations.hidden.shape[0] == 1 else None
        if drafting is not None and text is not None and text.shape[1] == 1 and self._may_guess(drafting):
            if self._embeds is None:
                self._embeds = torch.equal(self._embed(text, keep), activations.hidden)
            if self._embeds and self._reads(keep, drafting):
                self._has_led = True
                output = self._lead.step(int(text[0, 0]), activations, processors)
                if drafting.reads_outputs:
                    self._lead.context.outputs.note(keep, output[0])
                return output
        if self._has_led:
            self._has_led = False
            self._lead.rest()
        reads = drafting is not None and drafting.reads_outputs and text is not None and self._can_guess
        began, tokens = time.perf_counter(), activations.hidden.shape[1]
        output = self._session.step(activations, keep=keep, rows=rows, want=tokens if reads else want)
        if reads:
            self._lead.context.outputs.note(keep, output[0])
            output = output[:, tokens - want :]
        if drafting is not None and tokens == 1:
            self._lead.pace.asked(began)
            self._lead.pace.returned(time.perf_counter(), is_guessed=False, is_trip=True)
        self._unread.append((keep, None if text is None else text.tolist()[0]))
        return output

    def close(self) -> None:
        """Free the leases."""
        self._lead.close()
        self._session.close()

    def _may_guess(self, drafting: Drafting) -> bool:
        """Decide for one token; steps that are in flight already are used anyway."""
        if not self._can_guess or self._embeds is False:
            return False
        pace, lead = self._lead.pace, self._lead
        if drafting.always or (lead.is_ahead and not self._unread):
            return True
        return pays(pace, self._session.load, self._limits)

    def _reads(self, keep: int, drafting: Drafting) -> bool:
        """Bring the lead's text to what the servers hold. Returns whether all of its tokens are known."""
        lead = self._lead
        lead.draws_from(drafting)
        for kept, ids in [*self._unread, (keep, None)] if self._unread or keep != lead.length else ():
            lead.restart(kept, ids)
        self._unread.clear()
        return lead.length == keep > 0
