"""What is kept of a session for an audit."""

import torch

from swarm.activations import Activations
from swarm.blocks import Blocks
from swarm.client.planning.route import Hop
from swarm.client.session.transcript import Transcript, TranscriptLimits
from swarm.protocol.journal import Past
from tests.client.test_route import server


def output(*values):
    return torch.tensor([[[float(value)] for value in values]])


def told(transcript):
    found = transcript if not isinstance(transcript, Transcript) else transcript.testimony(past(1))
    return {at: tensor.item() for at, tensor in found.outputs.items()}


def test_the_wanted_positions_are_the_last_ones_of_a_step():
    transcript = Transcript()
    transcript.note(0, gathered=False, tokens=4, output=output(2, 3))
    transcript.note(4, gathered=False, tokens=1, output=output(4))
    transcript.note(5, gathered=False, tokens=1, output=None)
    assert told(transcript) == {2: 2.0, 3: 3.0, 4: 4.0}


def test_positions_that_are_taken_back_are_forgotten():
    transcript = Transcript()
    transcript.note(0, gathered=False, tokens=3, output=output(0, 1, 2))
    transcript.note(1, gathered=False, tokens=1, output=output(9))
    assert told(transcript) == {0: 0.0, 1: 9.0}
    transcript.note(1, gathered=False, tokens=1, output=None)
    assert told(transcript) == {0: 0.0}


def test_rows_that_change_places_make_earlier_outputs_useless():
    transcript = Transcript()
    transcript.note(0, gathered=False, tokens=2, output=output(0, 1))
    transcript.note(2, gathered=True, tokens=1, output=output(2))
    assert told(transcript) == {2: 2.0}


def test_the_first_positions_are_forgotten_first():
    transcript = Transcript(TranscriptLimits(output_bytes=8))
    for at in range(5):
        transcript.note(at, gathered=False, tokens=1, output=output(at))
    assert told(transcript) == {3: 3.0, 4: 4.0}


def past(length):
    return (Past(0, Activations(torch.zeros(1, length, 2))),)


def test_hops_that_are_replaced_are_audited_for_what_they_told_until_then():
    transcript, hop = Transcript(), Hop(server(0, 4), Blocks(0, 4))
    transcript.stands((hop,), ())
    transcript.note(0, gathered=False, tokens=2, output=output(0, 1))
    transcript.stands((Hop(hop.signed, hop.blocks, 7.0),), past(2))
    transcript.note(2, gathered=False, tokens=1, output=output(2))
    assert not transcript.testimony(past(3)).has_moved
    for other in (Hop(server(0, 4), Blocks(0, 4)), hop):
        transcript.stands((other,), past(3))
        transcript.note(1, gathered=False, tokens=1, output=output(9))
    found = transcript.testimony(past(9))
    assert [each.process for each in found.route] == [hop.process]
    assert (found.has_moved, found.length, told(found)) == (True, 3, {0: 0.0, 1: 1.0, 2: 2.0})


def test_hops_that_take_over_are_not_audited_for_what_others_computed():
    transcript = Transcript()
    transcript.stands((Hop(server(0, 4), Blocks(0, 4)),), ())
    transcript.note(0, gathered=False, tokens=2, output=None)
    transcript.stands((Hop(server(0, 4), Blocks(0, 4)),), past(2))
    transcript.note(2, gathered=False, tokens=1, output=output(2))
    assert transcript.testimony(past(3)) is None


def test_hops_that_begin_anew_are_audited():
    transcript, hop = Transcript(), Hop(server(0, 4), Blocks(0, 4))
    for each in (Hop(server(0, 4), Blocks(0, 4)), hop):
        transcript.stands((each,), ())
    transcript.note(0, gathered=False, tokens=1, output=output(2))
    found = transcript.testimony(past(1))
    assert (found.route, found.has_moved) == ((hop,), False)


def test_an_output_holds_no_frame_that_others_share():
    frame = torch.zeros(1, 128, 64)
    transcript = Transcript()
    for at, column in enumerate(frame.split(1, 1)):
        transcript.note(at, gathered=False, tokens=1, output=column)
    held = sum(each.untyped_storage().nbytes() for each in transcript.testimony(past(1)).outputs.values())
    assert held == sum(each.nbytes for each in transcript.testimony(past(1)).outputs.values())
