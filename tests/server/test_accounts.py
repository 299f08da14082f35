"""What one peer may take of a server in a second."""

from swarm.server.accounts import Accounts
from swarm.server.gateways import GatewayAllowance
from swarm.server.limits import AccountLimits
from swarm.server.refusals import Declined

LIMITS = AccountLimits()
NOW = 1000.0


def refused(answer: Declined | None) -> Declined:
    assert answer is not None
    assert answer.code == "busy"
    assert answer.retry_after_s is not None
    assert answer.retry_after_s > 0
    return answer


def test_too_many_steps_or_bytes_are_refused_for_a_time():
    accounts, now = Accounts(), NOW
    for _ in range(int(LIMITS.steps_burst)):
        assert accounts.charge_step("a", 1, 1, now) is None
    declined = refused(accounts.charge_step("a", 1, 1, now))
    assert "2000 steps a second" in declined.why
    now += declined.retry_after_s
    assert accounts.charge_step("a", 1, int(10 * LIMITS.bytes_per_s), now) is None
    declined = refused(accounts.charge_step("a", 1, 1, now))
    assert "128 MiB of activations a second" in declined.why
    assert accounts.charge_step("a", 1, 1, now + declined.retry_after_s) is None


def test_a_past_is_taken_on_bounded_credit():
    accounts, now = Accounts(), NOW
    assert accounts.charge_step("a", 1, int(LIMITS.bytes_burst), now) is None
    account = accounts.of("a")
    assert account.debt_s(now) == 0
    assert accounts.lend("a", 1, int(LIMITS.bytes_per_s / 4), now) is None
    assert account.debt_s(now) == 0.25
    assert accounts.lend("a", 1, int(LIMITS.bytes_per_s / 2), now) is None
    now += refused(accounts.lend("a", 1, 1, now)).retry_after_s
    assert account.debt_s(now) == 0
    assert accounts.lend("a", 1, 1, now) is None


def test_one_peers_account_is_not_anothers():
    accounts = Accounts()
    for _ in range(int(LIMITS.openings_burst)):
        assert accounts.charge_opening("a", NOW) is None
    refused(accounts.charge_opening("a", NOW))
    assert accounts.charge_opening("b", NOW) is None


def test_a_crowd_opens_no_more_than_all_peers_may():
    accounts = Accounts()
    for number in range(int(LIMITS.all_openings_burst)):
        assert accounts.charge_opening(str(number), NOW) is None
    assert "by all peers" in refused(accounts.charge_opening("one more", NOW)).why


def test_a_gateways_openings_are_bounded_by_its_own_rate_alone():
    """When a hop dies, all of a gateway's sessions are rerouted at once."""
    allowance = GatewayAllowance(sessions=512, openings_per_s=500.0, steps_per_s=2000.0)
    accounts = Accounts(gateways={"gateway": allowance})
    for _ in range(int(3 * LIMITS.all_openings_burst)):
        assert accounts.charge_opening("gateway", NOW) is None
    for number in range(int(LIMITS.all_openings_burst)):
        assert accounts.charge_opening(str(number), NOW) is None
    for _ in range(int(allowance.of(LIMITS).openings_burst - 3 * LIMITS.all_openings_burst)):
        assert accounts.charge_opening("gateway", NOW) is None
    assert "500 openings a second" in refused(accounts.charge_opening("gateway", NOW)).why


def test_settled_accounts_are_forgotten_and_others_are_not():
    accounts = Accounts()
    accounts.charge_opening("a", NOW)
    accounts.sweep(NOW)
    assert set(accounts.peers) == {"a"}
    accounts.sweep(NOW + 60.0)
    assert not accounts.peers


def test_gateway_may_have_more_than_others():
    accounts = Accounts(gateways={"gateway": GatewayAllowance(sessions=256, openings_per_s=80.0, steps_per_s=20_000.0)})
    for _ in range(int(10 * LIMITS.steps_burst)):
        assert accounts.charge_step("gateway", 1, 1, NOW) is None
    assert "20000 steps a second" in refused(accounts.charge_step("gateway", 1, 1, NOW)).why
    for _ in range(int(LIMITS.steps_burst)):
        assert accounts.charge_step("other", 1, 1, NOW) is None
    assert "2000 steps a second" in refused(accounts.charge_step("other", 1, 1, NOW)).why


def test_bursts_of_a_gateway_grow_with_its_rates():
    openings_per_s, steps_per_s = 10 * LIMITS.openings_per_s, 3 * LIMITS.steps_per_s
    limits = GatewayAllowance(sessions=256, openings_per_s=openings_per_s, steps_per_s=steps_per_s).of(LIMITS)
    assert (limits.openings_per_s, limits.openings_burst) == (openings_per_s, 10 * LIMITS.openings_burst)
    assert (limits.steps_per_s, limits.steps_burst) == (steps_per_s, 3 * LIMITS.steps_burst)


def test_gateway_with_less_than_others_keeps_their_bursts():
    limits = GatewayAllowance(sessions=1, openings_per_s=1.0, steps_per_s=1.0).of(LIMITS)
    assert (limits.openings_per_s, limits.openings_burst) == (1.0, LIMITS.openings_burst)
    assert (limits.steps_per_s, limits.steps_burst) == (1.0, LIMITS.steps_burst)


def test_tokens_are_charged_and_those_that_were_not_computed_are_given_back():
    accounts = Accounts()
    half = int(LIMITS.tokens_burst / 2)
    for _ in range(2):
        assert accounts.charge_step("a", half, 1, NOW) is None
    declined = refused(accounts.charge_step("a", 1, 1, NOW))
    assert "16384 tokens a second" in declined.why
    assert declined.retry_after_s is not None
    accounts.give_back("a", half)
    assert accounts.charge_step("a", 1, 1, NOW) is None
