"""The chat page as it is served: its headers, its files, and that nothing of it comes from elsewhere."""

import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from swarm.gateway import pages
from tests.gateway.scripted import scripted

STATIC = Path(pages.__file__).with_name("static")
VOID = {"input", "link", "meta", "path", "circle", "rect", "use"}
IMPORT = re.compile(r"""^import\s(?:.*?\sfrom\s)?"([^"]+)";""", re.MULTILINE)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted(lambda _: "unused") as (url, _):
        yield url


class Reader(HTMLParser):
    """Elements with their attributes, and the tags that are not closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def page(url: str) -> Reader:
    return Reader(httpx.get(url).text)


def addresses(page: Reader, *names: str) -> list[str]:
    return [value for _, attributes in page.elements for name in names if (value := attributes.get(name))]


def test_every_answer_of_the_page_forbids_strangers_scripts(url: str, page: Reader) -> None:
    (script,) = [each for each in addresses(page, "src") if each.endswith("/page.js")]
    for path in ("/", "/" + script, "/static/0/nothing"):
        headers = httpx.get(url + path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert not re.search("unsafe|http|data:", policy)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"


def test_page_loads_nothing_from_elsewhere_and_has_no_inline_code(page: Reader) -> None:
    for tag, attributes in page.elements:
        assert tag != "style"
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for name in ("src", "href", "action"):
            assert not (attributes.get(name) or "/").startswith(("http", "//", "data:", "javascript:"))
    assert all(attributes.get("src") for tag, attributes in page.elements if tag == "script")


def test_page_closes_its_elements_and_names_each_once(page: Reader) -> None:
    assert (page.wrong, page.open) == ([], [])
    ids = addresses(page, "id")
    assert len(ids) == len(set(ids))
    names = ("aria-labelledby", "aria-describedby", "for", "popovertarget")
    referred = {part for value in addresses(page, *names) for part in value.split()}
    referred |= {each[1:] for each in addresses(page, "href") if len(each) > 1 and each.startswith("#")}
    assert len(referred) > 20
    assert referred <= set(ids)


def test_page_says_once_that_servers_can_read(page: Reader) -> None:
    text = re.sub(r"\s+", " ", "".join(page.words))
    assert text.count("Servers compute on your text and can read it. Do not send secrets.") == 1


def test_page_that_has_not_changed_is_not_sent_again(url: str) -> None:
    first = httpx.get(url)
    assert first.headers["Cache-Control"] == "no-cache"
    assert httpx.get(url, headers={"If-None-Match": first.headers["ETag"]}).status_code == 304
    assert httpx.get(url, headers={"If-None-Match": 'W/"other"'}).status_code == 200
    assert httpx.head(url).status_code == 200


def test_files_are_kept_for_ever_at_their_versions_address(url: str, page: Reader) -> None:
    loaded = [each for each in addresses(page, "src", "href") if each.startswith("static/")]
    assert len(loaded) == 4
    for path in loaded:
        answer = httpx.get(urljoin(url, path))
        assert answer.status_code == 200
        assert "immutable" in answer.headers["Cache-Control"]
        name = path.split("/", 2)[2]
        assert answer.content == (STATIC / name).read_bytes()
        assert httpx.get(f"{url}/static/0123456789abcdef/{name}").status_code == 404


def test_modules_import_only_files_that_are_served() -> None:
    for name in pages.FILES:
        if not name.endswith(".js") or name.startswith("vendor/"):
            continue
        source = (STATIC / name).read_text()
        assert {each.removeprefix("./") for each in IMPORT.findall(source)} <= set(pages.FILES)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|https?://", source)


def test_only_named_files_are_served(url: str) -> None:
    digest = pages.load_assets().digest
    for path in ("../pages.py", "%2e%2e/pages.py", "vendor/README.md", "page.html", "/etc/passwd"):
        assert httpx.get(f"{url}/static/{digest}/{path}", follow_redirects=True).status_code == 404


def test_all_files_of_the_folder_are_served_or_explained() -> None:
    there = {str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file()}
    explained = {"page.html", "vendor/README.md", "vendor/marked.LICENSE", "vendor/purify.LICENSE"}
    assert there == explained | set(pages.FILES)


def test_vendored_files_are_what_their_list_says() -> None:
    listed = re.findall(r"\| `(\w+\.js)` .*`([0-9a-f]{64})`", (STATIC / "vendor" / "README.md").read_text())
    assert {name for name, _ in listed} == {"marked.js", "purify.js"}
    for name, digest in listed:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
