"""Tokens that bounds choose are those of the exact head, near ties and seeded draws among them."""

import pytest
import torch
from torch.nn.functional import linear
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm.client.hf.choice import ChoiceLimits, choose, rule_of
from swarm.model.bounded import BoundedHead, Bounds
from swarm.model.eightbits import is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="torch has no int8 products on this processor")

VOCABULARY, WIDTH = 3000, 64
DTYPES = (torch.float32, torch.bfloat16)
IDS = torch.tensor([[4, 17, 17, 256, 1000]])
PENALTY, WARM = RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7)
NOT_THESE = SuppressTokensLogitsProcessor(range(0, VOCABULARY, 5))
GREEDY = {"nothing": [], "a penalty": [PENALTY], "not a fifth of them": [NOT_THESE]}
DRAWN = {
    "nothing": [],
    "warm, with a penalty": [PENALTY, WARM],
    "top-k": [WARM, TopKLogitsWarper(20)],
    "top-k, hot": [TemperatureLogitsWarper(3.0), TopKLogitsWarper(40)],
    "top-k, top-p": [WARM, TopKLogitsWarper(50), TopPLogitsWarper(0.8)],
    "not a fifth of them, top-k, top-p": [NOT_THESE, TopKLogitsWarper(50), TopPLogitsWarper(0.5)],
}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def head(request):
    """A head whose every third row is the one before it but for a last bit or none; so ties are near or exact."""
    weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0)).to(request.param)
    weight[1::3] = weight[0::3]
    weight[2::6] = weight[0::6]
    bits = torch.int32 if request.param == torch.float32 else torch.int16
    weight[1::3, 7] = (weight[1::3, 7].view(bits) + 1).view(request.param)
    return BoundedHead(weight)


def hidden_states(count, dtype, seed=1):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, WIDTH, generator=rng) * torch.rand(count, 1, generator=rng) * 2
    return hidden.to(dtype).split(1)


def exact(head, hidden, processors):
    """What `generate()` does."""
    scores = linear(hidden[None], head.weight)[:, -1].to(copy=True, dtype=torch.float32)
    return LogitsProcessorList(processors)(IDS, scores)


@pytest.mark.parametrize("processors", GREEDY.values(), ids=GREEDY)
def test_greedy_tokens_are_the_exact_heads(head, processors):
    rule, decided, tied = rule_of(processors, is_drawn=False), 0, 0
    for hidden in hidden_states(100, head.weight.dtype):
        scores = exact(head, hidden, processors)
        chosen = choose(head, hidden, IDS, rule)
        assert chosen.token in {int(scores.argmax()), None}
        decided += chosen.token is not None
        tied += bool((scores == scores.max()).sum() > 1)
    assert tied > 10  # else this would show little
    assert decided > 10


def test_greedy_tokens_of_a_plain_head_need_few_rows():
    weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(3))
    head, decided, rows = BoundedHead(weight), 0, 0
    for hidden in hidden_states(100, torch.float32):
        chosen = choose(head, hidden, IDS, rule_of([], is_drawn=False))
        assert chosen.token in {int(exact(head, hidden, []).argmax()), None}
        decided += chosen.token is not None
        rows += chosen.rows
    assert decided > 95
    assert rows < 100 * VOCABULARY / 50


@pytest.mark.parametrize("processors", DRAWN.values(), ids=DRAWN)
def test_seeded_draws_are_the_exact_heads(head, processors):
    rule, decided = rule_of(processors, is_drawn=True), 0
    for seed, hidden in enumerate(hidden_states(60, head.weight.dtype)):
        noise = torch.empty(1, VOCABULARY).exponential_(1, generator=torch.Generator().manual_seed(seed))[0]
        probabilities = exact(head, hidden, processors).softmax(-1)
        drawn = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(seed))
        chosen = choose(head, hidden, IDS, rule, noise)
        assert chosen.token in {int(drawn), None}
        decided += chosen.token is not None
    assert decided > 30


class Known:
    """A head of which all bounds are known, and become no narrower."""

    def __init__(self, low, high):
        self._low, self._high = low, high

    def bounds(self, hidden):
        return Bounds(self._low.clone(), self._high.clone())

    def narrow(self, hidden, rows):
        return Bounds(self._low[rows], self._high[rows])


ANY_HIDDEN = torch.zeros(1, WIDTH)


@pytest.mark.parametrize(
    ("low", "high", "token"),
    [
        ((1.0, 1.0), (1.0, 1.0), 0),  # torch takes the first of equal ones
        ((1.0, 0.0), (1.0, 1.0), 0),  # the later one can be equal at most
        ((0.0, 1.0), (1.0, 1.0), None),  # the earlier one may be equal, and then it is taken
        ((0.0, 1.0), (0.9, 1.0), 1),
        ((1.0, 0.0), (1.0, 1.1), None),
        ((-torch.inf, -torch.inf), (-torch.inf, -torch.inf), None),
    ],
)
def test_of_equal_logits_the_first_is_chosen(low, high, token):
    head = Known(torch.tensor(low), torch.tensor(high))
    assert choose(head, ANY_HIDDEN, IDS, rule_of([], is_drawn=False)).token == token


@pytest.mark.parametrize("count", [50, VOCABULARY], ids=["all are computed", "too many"])
def test_a_race_that_float32_may_decide_otherwise_is_not_decided(count):
    head, rule = Known(*torch.zeros(2, count)), rule_of([], is_drawn=True)
    for ahead, token in ((1e-5, None), (1e-3, 5)):
        noise = torch.ones(count)
        noise[5] -= ahead
        assert choose(head, ANY_HIDDEN, IDS, rule, noise).token == token


def test_a_draw_without_a_normal_probability_is_not_decided():
    head, rule = Known(*torch.zeros(2, 50)), rule_of([], is_drawn=True)
    for least, token in ((0.0, None), (1e-31, None), (1e-29, 5)):
        noise = torch.ones(50)
        noise[5] = least
        assert choose(head, ANY_HIDDEN, IDS, rule, noise).token == token


def test_a_token_that_top_k_may_leave_out_is_not_chosen():
    low, high = torch.zeros(2, VOCABULARY)
    low[:3], high[:3] = 5.0, 6.0
    noise = torch.ones(VOCABULARY)
    noise[2] = 1e-6
    for top_k, token in ((2, None), (3, 2)):
        rule = rule_of([TopKLogitsWarper(top_k)], is_drawn=True)
        assert choose(Known(low, high), torch.zeros(1, WIDTH), IDS, rule, noise).token == token


def test_a_token_at_top_ps_border_is_not_decided():
    """Two tokens have the same probability, and top-p cuts where float32's sums may err."""
    weight = torch.zeros(VOCABULARY, WIDTH)
    weight[:2, 0] = 1.0
    hidden = torch.zeros(1, WIDTH)
    hidden[0, 0] = 30.0
    noise = torch.ones(VOCABULARY)
    noise[1] = 0.5
    head = BoundedHead(weight)
    for top_p, token in ((0.5002, None), (0.4998, None), (0.51, 1)):
        rule = rule_of([TopKLogitsWarper(2), TopPLogitsWarper(top_p)], is_drawn=True)
        assert choose(head, hidden, IDS, rule, noise).token == token


def test_a_token_behind_top_ps_border_is_not_decided():
    """The first token has three fifths of the mass. The second wins if top-p keeps it."""
    logits = torch.full((50,), -100.0)
    logits[:2] = torch.tensor([0.6, 0.4]).log()
    noise = torch.ones(50)
    noise[1] = 0.1
    for top_p, token in ((0.5998, None), (0.6002, None), (0.59, 0), (0.61, 1)):
        rule = rule_of([TopKLogitsWarper(2), TopPLogitsWarper(top_p)], is_drawn=True)
        assert choose(Known(logits, logits), ANY_HIDDEN, IDS, rule, noise).token == token


def test_more_rows_than_are_worth_it_are_not_computed(head):
    hidden = hidden_states(1, head.weight.dtype)[0] * 0  # all logits are equal
    limits = ChoiceLimits(rows_max=64, rows_share=0.0)
    chosen = choose(head, hidden, IDS, rule_of([], is_drawn=False), limits=limits)
    assert (chosen.token, chosen.rows) == (None, limits.leaders)


def test_processors_that_are_not_known_leave_the_choice_to_the_exact_head():
    class Own(TemperatureLogitsWarper):
        pass

    top_p = TopPLogitsWarper(0.9)
    assert rule_of([Own(0.7)], is_drawn=True) is None
    assert rule_of([top_p], is_drawn=True) is None  # of the whole vocabulary's mass
    assert rule_of([TopKLogitsWarper(5), WARM], is_drawn=True) is None
    assert rule_of([TopKLogitsWarper(5), MinPLogitsWarper(0.1)], is_drawn=True) is None
    assert rule_of([TopKLogitsWarper(5000)], is_drawn=True) is None
    assert rule_of([TopKLogitsWarper(5, filter_value=-1e4)], is_drawn=True) is None
    assert rule_of([TopKLogitsWarper(5), TopPLogitsWarper(0.9, min_tokens_to_keep=2)], is_drawn=True) is None
    assert rule_of([TopKLogitsWarper(5), top_p], is_drawn=False) is None
    assert rule_of([TopKLogitsWarper(5), TopKLogitsWarper(9)], is_drawn=True) is None
    assert rule_of([TopKLogitsWarper(5), top_p, TopPLogitsWarper(0.95)], is_drawn=True) is None
    assert rule_of([WARM, TopKLogitsWarper(5), top_p], is_drawn=True) is not None
