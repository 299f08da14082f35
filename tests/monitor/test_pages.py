"""The health page as it is served: what it says, to whom it says it, and what it never says."""

import hashlib
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from http.client import HTTPMessage
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("fastapi", reason="needs pip install 'swarm-inference[health]'")

from swarm.monitor import pages, view, wording
from swarm.monitor.state import API, BlockState
from tests.monitor.page_support import (
    JOIN,
    MARKUP,
    NOW,
    Site,
    assessment,
    crowd,
    healthy,
    history,
    key,
    one_model,
    record,
    serving,
)

STATIC = Path(pages.__file__).with_name("static")


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(Site(one_model())) as serving_site:
        yield serving_site


def get(url: str, **headers: str) -> tuple[int, HTTPMessage, str]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


class Reader(HTMLParser):
    """Elements with their attributes, and the text in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def plain(site: Site) -> str:
    """Return the words of the page, and of each cell of a table, with single spaces between them."""
    page = get(site.url)[2].replace("</td>", " </td>").replace("</th>", " </th>")
    return re.sub(r"\s+", " ", Reader(page).text)


def rows(page: str) -> int:
    return len(re.findall(r'<tr role="row" class="is-', page))


def test_says_what_is_wrong_and_since_when(site: Site) -> None:
    text = Reader(get(site.url)[2]).text
    assert "org/Meadow-70B-Instruct broken" in text
    assert (
        "It does not work now: no server announces blocks 78:80; no server answers for blocks 68:74. Broken for 2 h"
        in text
    )
    assert "no server announces it: 2 blocks (78:80)" in text
    assert "one server: 6 blocks (66:68, 74:78)" in text


def test_says_that_it_works_and_how_fast() -> None:
    with serving(Site(healthy())) as site:
        text = Reader(get(site.url)[2]).text
    assert "It works: every block has a server that answers." in text
    assert "For one user 5.6 tok/s" in text
    assert "99.3 % fine of 288 in 24 h; first token 410 ms, then 61 ms each" in text


def test_says_by_which_way_servers_are_reached(site: Site) -> None:
    text = plain(site)
    ways = site.now.state.ways
    assert ways.punched
    assert ways.relayed
    for words in (f"Direct at an address {ways.direct}", f"Punched behind a router, straight {ways.punched}"):
        assert words in text
    assert f"Relayed behind a router, through an anchor {ways.relayed}" in text
    assert "Reverse" not in text, "no server is reached so"
    assert re.search(r"answered \d+\s+s ago, punched", text)


def test_says_how_loaded_each_anchor_is(site: Site) -> None:
    text = plain(site)
    last = {n: key(900 + n).peer_id[-8:] for n in range(4)}
    assert f"203.0.*.* …{last[0]} 12 0 pairs 120 kB/s of 16.8 MB/s" in text
    assert f"203.0.*.* …{last[1]} 13 nothing" in text
    assert f"*.a-long-name-of-a-provider.org …{last[2]} 1M 1M pairs 1,100 GB/s of 1,100 GB/s" in text
    assert f"203.0.*.* …{last[3]} does not tell" in text


def test_shows_the_first_anchors_and_the_others_on_request() -> None:
    with serving(Site(crowd(600, 2))) as site:
        page = get(site.url)[2]
    assert len(site.now.state.anchors) == API.anchors_max == 32
    assert page.count('<table class="plain anchors">') == 2
    assert "<summary>26 more</summary>" in page


def test_a_swarm_without_anchors_has_no_table_of_them() -> None:
    with serving(Site(assessment([record(1, 0, 4, n_blocks=4, anchors=())]))) as site:
        text = plain(site)
    assert "Direct at an address 1" in text
    assert "Anchor" not in text


def test_gives_the_exact_commands_to_join_and_to_use(site: Site) -> None:
    text = Reader(get(site.url)[2]).text
    (detail,) = site.now.details.values()
    assert detail.join_command in text
    assert "--blocks 68:74" in detail.join_command
    assert f'initial_peers=["{JOIN}"]' in text
    assert (
        f"swarm-generate org/Meadow-70B-Instruct --prompt 'Once upon a time' --network public --initial-peers {JOIN}"
        in text
    )


def test_the_python_on_the_page_is_python() -> None:
    (detail,) = one_model().details.values()
    compile(view.use(detail, "public").python, "page", "exec")


def test_markup_in_names_versions_and_devices_is_text(site: Site) -> None:
    page = get(site.url)[2]
    reader = Reader(page)
    assert not [tag for tag, _ in reader.elements if tag == "img"]
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 3


def test_markup_in_what_is_asked_for_is_text(site: Site) -> None:
    assert MARKUP not in get(f"{site.url}/?q={quote(MARKUP)}")[2]
    status, _, page = get(f"{site.url}/models/{quote(MARKUP, safe='')}")
    assert status == 404
    assert MARKUP not in page
    assert "No such model" in page


def test_a_name_that_is_no_hub_id_gets_into_no_command() -> None:
    shown = assessment([record(1, 0, 4, model='"); import os; ("', n_blocks=4)])
    (detail,) = shown.details.values()
    use = view.use(detail, "public")
    assert "import os" not in use.python + use.command
    assert '"MODEL"' in use.python


def test_no_address_of_a_server_is_on_the_page() -> None:
    shown = assessment([record(1, 0, 4, addresses=("203.0.113.77:4000",))])
    with serving(Site(shown)) as site:
        page = get(f"{site.url}/?all=true")[2]
    assert "203.0.113" not in page
    assert JOIN in page


def test_every_answer_forbids_strangers_scripts(site: Site) -> None:
    for path in ("/", "/models/unknown", "/static/page.js", "/static/unknown"):
        headers = get(site.url + path)[1]
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_code(site: Site) -> None:
    reader = Reader(get(site.url)[2])
    for tag, attributes in reader.elements:
        assert tag != "style"
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for name in ("src", "href", "action"):
            assert not (attributes.get(name) or "/").startswith(("http", "//", "data:", "javascript:"))
    assert all(attributes.get("src") for tag, attributes in reader.elements if tag == "script")


def test_shows_the_first_servers_and_all_when_asked() -> None:
    with serving(Site(crowd(600, 2))) as site:
        few, everything = get(site.url)[2], get(f"{site.url}/?all=true")[2]
    assert rows(few) == 100
    assert "Show all 300" in few
    assert rows(everything) == 300


def test_finds_a_server_by_name_peer_and_block(site: Site) -> None:
    (detail,) = site.now.details.values()
    found = get(f"{site.url}/?q=CELLAR")[2]
    assert rows(found) == sum("cellar" in server.name for server in detail.servers) == 3
    assert rows(get(f"{site.url}/?q={detail.servers[0].peer_id}")[2]) == 1
    assert rows(get(f"{site.url}/?block=75")[2]) == 1
    assert "None." in get(f"{site.url}/?q=nobody")[2]


def test_a_page_that_has_not_changed_is_not_sent_again(site: Site) -> None:
    _, headers, _ = get(site.url)
    assert get(site.url, If_None_Match=headers["ETag"])[0] == 304
    site.show(healthy())
    assert get(site.url, If_None_Match=headers["ETag"])[0] == 200


def test_renderings_are_kept_for_one_state_only_and_never_more_than_the_bound() -> None:
    kept, state = pages.Renderings(), healthy().state
    asked = pages.Asked(None, "")
    assert kept.get(state, asked) is None
    kept.put(state, asked, ("etag", b"page"))
    assert kept.get(state, asked) == ("etag", b"page")
    for n in range(2 * kept.kept_max):
        kept.put(state, pages.Asked(str(n), ""), ("etag", b"page"))
    assert len(kept.pages) == kept.kept_max
    kept.put(state, pages.Asked(None, "", q="rare"), ("etag", b"page"))
    assert kept.get(healthy().state, asked) is None


def test_static_files_are_those_that_are_meant_and_carry_their_digest(site: Site) -> None:
    (script,) = re.findall(r'src="([^"]+page\.js[^"]*)"', get(site.url)[2])
    status, headers, text = get(site.url + script)
    assert status == 200
    assert "immutable" in headers["Cache-Control"]
    assert hashlib.sha256(text.encode()).hexdigest().startswith(script.partition("v=")[2])
    for path in ("../pages.py", "%2e%2e/pages.py", "vendor/README.md", "/etc/passwd"):
        assert get(f"{site.url}/static/{path}")[0] == 404


def test_vendored_files_are_what_their_list_says() -> None:
    listed = re.findall(r"\| `(uplot[\w.]+)` .*`([0-9a-f]{64})`", (STATIC / "vendor" / "README.md").read_text())
    assert {name for name, _ in listed} == {"uplot.js", "uplot.css"}
    for name, digest in listed:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest


def test_bad_queries_are_refused(site: Site) -> None:
    for query in ("q=" + "x" * 65, "block=-1", "block=many", "window=1y"):
        assert get(f"{site.url}/?{query}")[0] == 422


def test_an_empty_swarm_has_a_page() -> None:
    with serving(Site(assessment([]))) as site:
        status, _, page = get(site.url)
    assert status == 200
    assert "No model is served in this swarm yet" in page


def test_an_unreadable_swarm_is_said_to_be_so() -> None:
    shown = healthy()
    reading = shown.state.reading.model_copy(update={"error": "nobody answered"})
    site = Site(type(shown)(shown.state.model_copy(update={"reading": reading}), shown.details))
    with serving(site):
        assert "The swarm could not be read: nobody answered. What stands here is of 21 Sep 2026, 14:13 UTC." in (
            Reader(get(site.url)[2]).text
        )


# --- what is worked out for it ---------------------------------------------------------------------------------------


def test_a_huge_model_has_a_bounded_map_whose_cells_tell_the_worst() -> None:
    blocks = tuple(BlockState(block=n, status="spare", online=2, announced=2) for n in range(4096))
    hole = blocks[77].model_copy(update={"status": "missing", "online": 0})
    cells = view.cells((*blocks[:77], hole, *blocks[78:]))
    assert len(cells) == 256
    assert [(cell.label, cell.online) for cell in cells if cell.status == "missing"] == [("64:80", 0)]
    assert cells[-1].stop == 4096


def test_a_small_model_has_a_cell_for_each_block() -> None:
    blocks = tuple(BlockState(block=n, status="single", online=1, announced=1) for n in range(12))
    assert [cell.label for cell in view.cells(blocks)] == [str(n) for n in range(12)]


def test_broken_since_is_when_the_last_run_of_broken_points_began() -> None:
    past = view.past(history(None, "24h"), broken=True)
    assert past.broken_since == NOW - 80 * 120
    assert view.past(history(None, "24h"), broken=False).broken_since is None
    assert past.working == pytest.approx(640 / 720)
    assert len(past.rows) <= 12
    assert past.rows[0].at > past.rows[-1].at


def test_an_empty_history_says_nothing() -> None:
    empty = history(None, "24h").model_copy(update={"points": ()})
    assert view.past(empty, broken=True) == view.Past(None, None, ())
    assert view.past(None, broken=True) == view.Past(None, None, ())


@pytest.mark.parametrize(
    ("filtered", "expected"),
    [
        (wording.figure(7.25), "7.2"),
        (wording.figure(20.0), "20"),
        (wording.figure(57.04), "57"),
        (wording.figure(950.4), "950"),
        (wording.figure(8192), "8,192"),
        (wording.figure(12345), "12.3k"),
        (wording.figure(999_400), "999k"),
        (wording.figure(3_375_478), "3.4M"),
        (wording.figure(41_000_000), "41M"),
        (wording.figure(None), wording.NOT_KNOWN),
        (wording.rate(None), wording.NOT_KNOWN),
        (wording.bandwidth(0), "0 kB/s"),
        (wording.bandwidth(120_400), "120 kB/s"),
        (wording.bandwidth(999_600), "1 MB/s"),
        (wording.bandwidth(16 << 20), "16.8 MB/s"),
        (wording.bandwidth(2.5e9), "2.5 GB/s"),
        (wording.share(0.9999), "99.9 %"),
        (wording.share(1.0), "100 %"),
        (wording.took(410.0), "410 ms"),
        (wording.took(1240.0), "1.2 s"),
        (wording.lasting(59.0), "59 s"),
        (wording.lasting(4000.0), "66 min"),
        (wording.lasting(90000.0), "25 h"),
        (wording.lasting(400000.0), "4 days"),
        (wording.plural(1, "server"), "1 server"),
        (wording.plural(2000, "server"), "2,000 servers"),
        (wording.machine(NOW), "2026-09-21T14:13:20Z"),
    ],
)
def test_numbers_and_times_read_as_people_write_them(filtered: str, expected: str) -> None:
    assert filtered.replace("\N{NO-BREAK SPACE}", " ") == expected
