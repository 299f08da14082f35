"""The mutants of SECURITY.md's guarantees: code that breaks one, and the test that is to notice.

A mutant replaces text of one file. The text stands there, else a test of this table fails: who changes the code that
keeps a guarantee changes its mutants, too.
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken guarantee.

    guarantee: the first cell of its line in SECURITY.md. breaks: what the code no longer does. old, new: every
    occurrence of the one in the file becomes the other. test: the name of the test that is to fail.
    """

    guarantee: str
    breaks: str
    file: str
    old: str
    new: str
    test: str


def guarantees(page: str) -> dict[str, frozenset[str]]:
    """Return the tests that SECURITY.md names for each guarantee. page: its text."""
    lines = page.split("\n## Guarantees\n")[1].split("\n## ", maxsplit=1)[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {
        first: frozenset(word.strip("`") for word in last.split())
        for first, *_, last in cells
        if last.startswith("`test_")
    }


def mutants() -> tuple[Mutant, ...]:
    """Return all of them, in the order of SECURITY.md."""
    return tuple(Mutant(guarantee, *rest) for guarantee, several in _by_guarantee().items() for rest in several)


def _by_guarantee() -> dict[str, list[tuple[str, str, str, str, str]]]:
    greeting, gates, session = "swarm/net/greeting.py", "server/gates.py", "server/session.py"
    admission, hosting, handler = "server/admission.py", "server/hosting.py", "server/handler.py"
    checkpoint, reading, validator = "swarm/model/checkpoint.py", "swarm/model/reading.py", "dht/validator.py"
    return {
        "A frame counts once, in order, in its direction, on its channel": [
            (
                "frames are not numbered",
                "swarm/net/frames.py",
                "self._number += 1",
                "self._number += 0",
                "test_a_frame_out_of_its_place_is_rejected",
            ),
        ],
        "The other side is the peer that was asked for": [
            (
                "a hello counts for either role",
                greeting,
                '{True: b"swarm channel initiator", False: b"swarm channel responder"}',
                '{True: b"swarm channel", False: b"swarm channel"}',
                "test_a_hello_of_the_same_direction_proves_nothing",
            ),
            (
                "the handshake's hash is not signed",
                greeting,
                "self._secrets.handshake_hash",
                'b""',
                "test_a_hello_that_was_said_on_another_channel_proves_nothing",
            ),
            (
                "signatures are not verified",
                greeting,
                "if not verify(key, domain, self._secrets.handshake_hash, bytes.fromhex(hello.signature)):",
                "if False:",
                "test_a_hello_signed_for_another_channel_proves_nothing",
            ),
            (
                "the initiator takes any peer",
                greeting,
                "if self.remote is not None and peer != self.remote.peer:",
                "if False:",
                "test_another_identity_behind_the_right_channel_key_is_rejected",
            ),
        ],
        "Only the owner controls a session, only its previous hop feeds it": [
            (
                "any channel controls a session",
                "server/registry.py",
                "session is not None and session.owner is channel",
                "session is not None",
                "test_a_stranger_can_neither_push_into_a_session_nor_close_nor_open_it_again",
            ),
            (
                "steps come from any peer",
                gates,
                'STEP_GATES: tuple[Gate, ...] = (\n    Gate("seat", _seat),\n',
                "STEP_GATES: tuple[Gate, ...] = (\n",
                "test_activations_count_from_the_named_previous_peer_only",
            ),
            (
                "pieces of a past come from any peer, in any epoch",
                gates,
                'REBUILD_GATES: tuple[Gate, ...] = (\n    Gate("seat", _seat),\n',
                "REBUILD_GATES: tuple[Gate, ...] = (\n",
                "test_a_past_comes_from_its_previous_hop_and_in_its_epoch_alone",
            ),
            (
                "pieces of a past come from the previous hop in any epoch",
                gates,
                "if sender == seat.previous and epoch == seat.epoch:",
                "if sender == seat.previous and (epoch == seat.epoch or isinstance(facts.message, Rebuild)):",
                "test_a_past_comes_from_its_previous_hop_and_in_its_epoch_alone",
            ),
            (
                "any peer speaks as the next hop",
                handler,
                "session.peers.next is not channel or message.epoch",
                "message.epoch",
                "test_a_stranger_cannot_fail_a_session_by_speaking_as_its_next_hop",
            ),
        ],
        "A previous hop feeds it no longer, and no more, than granted": [
            (
                "a grant's time does not count for a past",
                gates,
                '    Gate("twice", _twice),\n    Gate("time", _time),\n',
                '    Gate("twice", _twice),\n',
                "test_a_past_that_comes_after_its_grant_is_refused",
            ),
            (
                "a grant's tokens do not bound a past",
                gates,
                '    Gate("window", _window),\n    Gate("tokens", _tokens),\n',
                '    Gate("window", _window),\n',
                "test_a_past_that_is_rebuilt_is_part_of_the_grant",
            ),
            (
                "a past uses up no tokens",
                session,
                "if self.seat.grant.tokens is not None:",
                "if self.seat.grant.tokens is not None and not isinstance(message, Rebuild):",
                "test_a_past_that_is_rebuilt_is_part_of_the_grant",
            ),
            (
                "a grant has no end",
                gates,
                "if facts.now > session.seat.grant.ends_at:",
                "if False:",
                "test_a_grant_ends_with_its_time_and_a_reroute_gives_another",
            ),
            (
                "the tokens of one row count",
                session,
                "self.seat.spend(rows * tokens)",
                "self.seat.spend(tokens)",
                "test_a_grant_ends_with_its_tokens_and_those_of_all_rows_count",
            ),
        ],
        "No peer takes a session's name from its owner": [
            (
                "names have no owner",
                admission,
                "and is_name_of(channel.peer, request.session):",
                "and False:",
                "test_whoever_takes_a_sessions_name_gives_way_to_whose_it_is",
            ),
        ],
        "Only the owner reroutes or replays, and only with a later epoch": [
            (
                "any channel reroutes and replays",
                "server/registry.py",
                "session is not None and session.owner is channel",
                "session is not None",
                "test_a_stranger_can_neither_reroute_nor_replay_a_session",
            ),
            (
                "a reroute may have any epoch",
                handler,
                "if request.epoch <= epoch:",
                "if False:",
                "test_a_reroute_needs_a_later_epoch",
            ),
            (
                "steps of any epoch count",
                gates,
                "if sender == seat.previous and epoch == seat.epoch:",
                "if sender == seat.previous:",
                "test_a_step_of_another_epoch_is_rejected",
            ),
        ],
        "A server dials only addresses that the next hop has signed": [
            (
                "a next record of any age counts",
                hosting,
                "late_s=late_s)",
                "late_s=1e12)",
                "test_a_next_record_that_does_not_hold_is_refused",
            ),
            (
                "the next record's signature is not verified",
                hosting,
                "late_s=late_s)",
                "late_s=late_s, verified=True)",
                "test_a_next_record_signed_by_somebody_else_is_refused",
            ),
            (
                "the next record may be of another model",
                hosting,
                "if record.root != self.root or not is_near or stop not in record.span:",
                "if not is_near or stop not in record.span:",
                "test_nor_is_it_taken_when_it_comes_by_a_reroute",
            ),
        ],
        "No peer finds the kept prefixes of another": [
            (
                "prefixes have no owner",
                "server/prefixes.py",
                "session.owner.peer",
                '"everybody"',
                "test_another_peer_with_the_same_tags_finds_nothing",
            ),
        ],
        "Infinite activations and NaN reach no cache": [
            (
                "numbers are not looked at",
                "server/inputs.py",
                "if not activations.is_finite():",
                "if False:",
                "test_activations_that_are_not_finite_are_refused_unapplied",
            ),
            (
                "a past's numbers are not looked at",
                gates,
                '    Gate("debt", _debt),\n    Gate("tensors", _tensors),\n',
                '    Gate("debt", _debt),\n',
                "test_a_past_that_is_not_finite_is_refused",
            ),
        ],
        "A server that two others contradict gets nothing more": [
            (
                "a wrong server is not banned",
                "client/session/sessions.py",
                "self.avoidance.ban(peer)",
                "pass",
                "test_server_that_leaves_a_block_out_is_found_and_left",
            ),
            (
                "plans take banned peers",
                "client/planning/router.py",
                "avoid={*avoid, *self._avoided.banned}",
                "avoid=avoid",
                "test_nothing_is_taken_from_a_wrong_server_though_there_is_no_other",
            ),
            (
                "a session on a wrong server keeps its pasts",
                "client/session/moving.py",
                "self._circuit.leave()",
                "pass",
                "test_chat_on_a_wrong_server_begins_anew_elsewhere",
            ),
        ],
        "Servers cannot tell a replay of an audit by its beginning": [
            (
                "a replay waits for its hops before it sends the prompt",
                "client/auditing/auditor.py",
                "self._opened(plan, case.blocks, hops, first)",
                "self._opened(plan, case.blocks, hops)",
                "test_a_replay_opens_and_begins_as_its_session_did",
            ),
            (
                "a replay has no steps of one position",
                "client/auditing/replaying.py",
                "min(prompt + singles, testimony.length)",
                "prompt",
                "test_a_server_that_is_wrong_in_single_steps_alone_is_found",
            ),
        ],
        "A lying auditor gets no honest server left out alone": [
            (
                "the reference is right without a third",
                "client/auditing/inquest.py",
                "if thirds else Verdict(doubted=rivals | accused | near)",
                "if thirds else Verdict(wrong=accused)",
                "test_without_a_third_holder_both_are_doubted",
            ),
            (
                "the reference is always right",
                "client/auditing/inquest.py",
                "if agree(third, base):",
                "if True:",
                "test_third_holder_that_agrees_with_the_accused_clears_it",
            ),
        ],
        "An auditor's page blames no server for another's doubt": [
            (
                "the odds blame one of two that are never apart",
                "client/auditing/odds.py",
                "return all(len(companies) - count >= limits.disputes_min for count in together.values())",
                "return True",
                "test_a_server_that_lies_only_beside_an_honest_one_gets_it_not_found",
            ),
        ],
        "A server that lies only beside another gets it not blamed": [
            (
                "an accusation holds between the same hops",
                "client/auditing/inquest.py",
                "if elsewhere is not None and (yield from _differs(elsewhere, blamed, beside, right, agree)):",
                "if True:",
                "test_a_server_that_lies_only_beside_another_gets_it_not_blamed",
            ),
            (
                "an accusation needs no control",
                "client/auditing/inquest.py",
                "if control is None or agree(control, elsewhere):",
                "if control is None:",
                "test_accused_between_others_is_compared_with_another_one_there",
            ),
            (
                "between others the accused is compared with a spoiled route",
                "client/auditing/inquest.py",
                "if agree(control, right):",
                "if True:",
                "test_accused_between_others_is_compared_with_another_one_there",
            ),
        ],
        "A server that is wrong at times gets no honest one found": [
            (
                "a doubt that a wrong server explains still counts",
                "client/auditing/inquest.py",
                "frozenset() if self.doubted & wrong else self.doubted",
                "self.doubted - wrong",
                "test_a_doubt_that_a_wrong_server_explains_is_gone",
            ),
            (
                "no replay elsewhere convicts",
                "client/auditing/inquest.py",
                "is_clear = not beside or is_alike",
                "is_clear = True",
                "test_server_that_is_wrong_otherwise_each_time_may_have_a_wrong_one_beside_it",
            ),
        ],
        "Right outputs excuse no false signature": [
            (
                "a doubt of a receipt is like one of outputs",
                "client/auditing/docket.py",
                "found |= self._signed.add(edge.ends)",
                "found |= self.ledger.doubts.add(processes_at(edge.ends))",
                "test_right_outputs_excuse_no_false_signature",
            ),
        ],
        "No record makes an auditor spend more than its share": [
            (
                "an audit is free",
                "swarm/monitor/allowance.py",
                "self._credit(now) - took_s",
                "self._credit(now)",
                "test_audits_take_no_more_than_their_share_of_the_time",
            ),
            (
                "servers that do not answer are drawn",
                "client/auditing/patrol.py",
                "record.peer_id in allowed and",
                "",
                "test_servers_that_do_not_answer_the_page_are_neither_drawn_nor_asked",
            ),
        ],
        "Claims of speed and nearness draw no client to a server": [
            (
                "a claim of speed is believed",
                "client/planning/costs.py",
                "return max(request.claimed_ms(announcement), min(request.ordinary_ms, shown_ms))",
                "return request.claimed_ms(announcement)",
                "test_a_boast_counts_as_an_ordinary_speed",
            ),
            (
                "a trip that one end announces is believed",
                "client/planning/stages.py",
                "by_both = (most(by_source) * most(1.0 - by_source)).astype(bool)",
                "by_both = most(by_source) >= 0.0",
                "test_a_boast_of_one_end_wins_no_place_in_a_route",
            ),
            (
                "an unknown trip hides a boast",
                "client/planning/costs.py",
                "max(_announced(one, other), default=0.0) / 2",
                "max(_announced(one, other), default=request.limits.unknown_rtt_ms) / 2",
                "test_a_trip_that_no_server_announces_hides_no_boast",
            ),
        ],
        "Claims draw no audit to a server": [
            (
                "claims decide the routes of replays",
                "client/planning/router.py",
                "return plan(asked) if draws is None else plan_blindly(asked, draws)",
                "return plan(asked)",
                "test_a_router_draws_routes_where_it_is_told_to",
            ),
            (
                "speeds stay as they are claimed",
                "client/planning/blind.py",
                '"decode_tps": tokens_per_s, ',
                "",
                "test_boasts_draw_no_replays",
            ),
        ],
        "No peer announces in another's name, replaces, shortens or replays its record": [
            (
                "signatures of records are not verified",
                validator,
                "network=self.network, verified=ours)",
                "network=self.network, verified=True)",
                "test_records_that_do_not_hold_are_refused_and_displace_none",
            ),
            (
                "an entry may outlive its record",
                validator,
                "abs(expiration - facts.expires) > self.limits.expiry_slack_s",
                "False",
                "test_records_that_do_not_hold_are_refused_and_displace_none",
            ),
            (
                "an older record takes a newer one's place",
                "dht/storage.py",
                "if known.place.rank >= entry.place.rank:",
                "if False:",
                "test_a_replayed_older_record_does_not_delete_ours",
            ),
        ],
        "A full key hides no newcomer": [
            (
                "a refused record goes nowhere",
                "dht/directory.py",
                "            if taken >= 0:\n",
                "            if True:\n",
                "test_servers_of_a_full_key_are_found_below_it",
            ),
            (
                "readers do not read below a full key",
                "dht/sampling.py",
                "return bool(held) and sorted(held)",
                "return False and sorted(held)",
                "test_servers_of_a_full_key_are_found_below_it",
            ),
        ],
        "Claims do not fill a reader's sample": [
            (
                "every record is drawn by its claims",
                "dht/sampling.py",
                "for entry in sources[i % 3 == 0] if",
                "for entry in sources[0] if",
                "test_fast_servers_come_first_and_claims_do_not_fill_a_sample",
            ),
            (
                "all readers get one sample",
                "dht/sampling.py",
                "hashlib.sha256(salt + entry.place.subkey.encode())",
                "hashlib.sha256(entry.place.subkey.encode())",
                "test_nodes_agree_on_one_readers_sample_and_readers_differ",
            ),
        ],
        "Few nodes' counts lead no reader astray": [
            (
                "the largest count is believed",
                "dht/sampling.py",
                "sorted(held)[(len(held) - 1) // 2]",
                "sorted(held)[-1]",
                "test_few_nodes_that_claim_a_full_key_do_not_make_it_one",
            ),
        ],
        "A packed answer unpacks to 4 MiB at most": [
            (
                "an answer unpacks to any size",
                "dht/sampling.py",
                "unpacker.decompress(data, limits.unpacked_max)",
                "unpacker.decompress(data)",
                "test_damaged_or_inflated_answers_hold_no_records",
            ),
        ],
        "A restarted server's record supersedes its last, even with an earlier clock": [
            (
                "sequence numbers begin anew",
                "dht/sequence.py",
                "return int(text) if",
                "return 0 if",
                "test_a_restarted_servers_record_supersedes_its_last_though_the_clock_went_back",
            ),
        ],
        "No record changes a name's root, or keeps a server from starting": [
            (
                "a record alone leads to a warning",
                "server/proofs.py",
                "        return False\n",
                "        return True\n",
                "test_a_record_of_nobody_is_no_namesake",
            ),
        ],
        "Records without a server move no other server": [
            (
                "a block may be left to one holder",
                "server/placement.py",
                "    return allowed\n",
                "    return allowed | True\n",
                "test_one_strong_server_does_not_draw_all_others_from_its_blocks",
            ),
            (
                "claims of nobody are counted one by one",
                "server/weights.py",
                "share = min(1.0, ",
                "share = max(1.0, ",
                "test_however_many_claims_of_nobody_add_little_to_any_block",
            ),
            (
                "a block may be left to holders that have shown nothing",
                "server/placement.py",
                "tps=float(holder.proven)",
                "tps=1.0",
                "test_claims_of_nobody_are_no_holders_that_a_block_may_be_left_to",
            ),
        ],
        "A server that shakes hands and serves nothing moves no other server": [
            (
                "an open session is proof enough",
                "server/probes.py",
                "        return running.answered / ",
                "        return max(1, running.answered) / ",
                "test_a_server_that_shakes_hands_and_serves_nothing_is_silent",
            ),
            (
                "outputs are not looked at",
                "server/probes.py",
                "or not fits or activations is None or not activations.is_finite():",
                "or False:",
                "test_a_server_that_shakes_hands_and_serves_nothing_is_silent",
            ),
            (
                "a claim is believed whatever was shown",
                "server/weights.py",
                "claim.power <= limits.slack * shown",
                "shown",
                "test_a_claim_far_above_what_a_probe_has_shown_counts_as_what_was_shown",
            ),
            (
                "late answers are not waited for",
                "server/probes.py",
                "max(loop.time() - began, 1e-3)",
                "1e-3",
                "test_a_server_shows_the_speed_of_its_slowest_answer",
            ),
        ],
        "Probes cost a stranger's server little": [
            (
                "a probe has as many steps as a server claims",
                "server/probes.py",
                "min(limits.steps_max, wanted)",
                "wanted * 10",
                "test_a_probe_costs_a_server_a_quarter_of_a_second_of_its_claimed_time",
            ),
            (
                "a look has no bound of probes",
                "server/proofs.py",
                "await probes.acquire()",
                "await asyncio.sleep(0)",
                "test_a_look_is_bounded",
            ),
        ],
        "Small questions cost a DHT node little": [
            (
                "answers cost nothing",
                "dht/protocol.py",
                "_pay(self._answered, context.remote_id, min(",
                "_pay(self._answered, context.remote_id, 0 * min(",
                "test_a_peer_that_asks_for_full_keys_again_and_again_is_refused",
            ),
            (
                "choosing among records costs nothing",
                "dht/sampling.py",
                "limits.drawn_bytes * n + limits.sorted_bytes * n // parts)",
                "0)",
                "test_reader_pays_for_the_records_that_it_gets",
            ),
            (
                "a caller is called back on demand",
                "dht/protocol.py",
                "            return dht_pb2.PingResponse(",
                "            await self.ping(context.remote_id)\n            return dht_pb2.PingResponse(",
                "test_callers_that_ask_to_be_called_back_hold_no_places",
            ),
        ],
        "Nodes that call once and go hide no node that answers": [
            (
                "all wait for a place",
                "dht/neighbours.py",
                "while len(waiting) > self._waiting_max:",
                "while False:",
                "test_strangers_that_call_once_take_bounded_room_and_hide_nobody",
            ),
            (
                "a caller counts as one that answers",
                "dht/neighbours.py",
                "if node in self._answered] or self.peers()",
                "if True] or self.peers()",
                "test_strangers_that_call_once_take_bounded_room_and_hide_nobody",
            ),
        ],
        "Only a p2pd that hivemind published is started": [
            (
                "any program is started",
                "swarm/net/program.py",
                "if found != wanted:",
                "if False:",
                "test_another_p2pd_is_never_started",
            ),
        ],
        "p2pd relays for no peer, within limits of memory and descriptors": [
            (
                "p2pd relays",
                "swarm/net/p2p/daemon.py",
                "await end_circuits(p2p, config.limits.start_timeout_s)",
                "pass",
                "test_p2pd_relays_for_no_peer_and_has_limits",
            ),
        ],
        "Strangers store nothing in p2pd": [
            (
                "any message is answered",
                "dht/whereabouts.py",
                "        if question.type != FIND_NODE:",
                "        if False:",
                "test_a_stranger_stores_nothing_in_p2pd",
            ),
        ],
        "Config, index and weights are those that the root names": [
            (
                "a config is used that is not the one in the manifest",
                checkpoint,
                "    if actual != expected:",
                "    if False:",
                "test_a_carried_manifest_does_not_vouch_for_swapped_files",
            ),
            (
                "weights are used that are not those in the manifest",
                reading,
                "    if actual != expected:",
                "    if False:",
                "test_a_byte_flipped_after_opening_is_noticed_when_the_span_is_loaded",
            ),
            (
                "any root will do",
                checkpoint,
                "if manifest.root != asked:",
                "if False:",
                "test_another_root_than_expected_is_refused",
            ),
        ],
        "Tokenizer, chat template and generation config are those that a pin names": [
            (
                "a pin names the root alone",
                checkpoint,
                "if digest and texts.digest != digest:",
                "if False:",
                "test_a_pin_names_the_texts",
            ),
            (
                "texts are read again for each use",
                checkpoint,
                "self._found = self._read()",
                "return self._read()",
                "test_texts_swapped_after_they_were_read_are_not_used",
            ),
            (
                "a tokenizer is used that is not the one that the hub lists",
                checkpoint,
                "if (told := source.told(name)) is not None:",
                "if (told := None) is not None:",
                "test_a_tokenizer_that_is_not_the_listed_one_is_refused_and_fetched_again",
            ),
        ],
        "A peer without the key is rejected at its first message, unanswered": [
            (
                "the network key is not part of the handshake",
                greeting,
                "psk=me.psk",
                "psk=None",
                "test_a_stranger_to_a_private_swarm_gets_no_answer",
            ),
        ],
        "A peer not on the list is refused at the handshake, unprocessed": [
            (
                "the list is not looked at",
                greeting,
                "if not self.me.access.admits(peer):",
                "if False:",
                "test_an_unlisted_peer_is_refused_and_nothing_of_it_processed",
            ),
        ],
        "Members of a public swarm dial no loopback or private address": [
            (
                "every address makes sense",
                "swarm/net/reach.py",
                "return not public or all(map(_is_global, (address, *_embedded(address))))",
                "return True",
                "test_a_public_swarms_members_do_not_dial_what_is_near",
            ),
        ],
        "Without a known key nothing is read, computed or told": [
            (
                "keys are compared in the time that they take",
                "swarm/gateway/keys.py",
                "if hmac.compare_digest(known, digest):",
                "if known == digest:",
                "test_every_key_is_compared_in_constant_time",
            ),
        ],
        "Pages of other sites cannot use it": [
            (
                "the gateway answers under any name",
                "swarm/gateway/doors.py",
                "if options.on_loopback and options.keys is None and not is_local(host):",
                "if False:",
                "test_rebound_name_is_refused_on_loopback",
            ),
            (
                "pages of any origin may call",
                "swarm/gateway/doors.py",
                "if origin is not None and not is_allowed(origin, host, options.origins):",
                "if False:",
                "test_page_of_another_site_is_refused",
            ),
        ],
        "No tenant continues another's conversation": [
            (
                "kept sessions have no owner",
                "swarm/gateway/conversations.py",
                "if kept.owner != owner:",
                "if False:",
                "test_kept_session_is_not_continued_for_another_owner",
            ),
        ],
        "Announced names cause no download": [
            (
                "every announced name is opened",
                "swarm/gateway/following.py",
                "if not is_allowed and not await",
                "if False and not await",
                "test_only_models_on_this_disk_or_the_list_are_opened",
            ),
        ],
    }
