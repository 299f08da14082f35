"""Addresses as values."""

import pytest

from swarm.net.address import Tcp, dialable, parse

TEXTS = {
    "127.0.0.1:80": Tcp("127.0.0.1", 80),
    "example.org:65535": Tcp("example.org", 65535),
    "[::1]:4000": Tcp("::1", 4000),
    "[fe80::1%eth0]:1": Tcp("fe80::1%eth0", 1),
}
BAD = ["", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:8o", "::1:80", "[::1]", "host:1" + "0" * 99]
BAD += ["host:٣", "host: 80"]


@pytest.mark.parametrize("text", TEXTS)
def test_an_address_is_read_and_written(text):
    assert parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


@pytest.mark.parametrize("text", BAD)
def test_text_that_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match=r"host:port|no port"):
        parse(text)


def test_texts_that_are_no_address_are_left_out():
    assert dialable(("a:1", "nonsense", "b:2", "c:0")) == (Tcp("a", 1), Tcp("b", 2))
