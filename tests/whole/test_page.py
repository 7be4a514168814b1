"""Goal: a person who opens the page sees the cache at work. Method: a real browser on a real server.

`TIERCEL_PICTURES=1` writes the pictures of docs/page.md.
"""

import json
import os
import time
from pathlib import Path
from random import Random

import httpx

from tests.server.scripted import ScriptedService, served
from tests.server.test_status import samples_of
from tests.wait import until
from tests.whole.browser import browsing
from tests.whole.process import running
from tiercel.server.options import ServerOptions

PICTURES = bool(os.environ.get("TIERCEL_PICTURES"))
DOCS = Path(__file__).parents[2] / "docs" / "figures"
TURNS = "document.querySelectorAll('.source')"
LAST = f"[...{TURNS}].at(-1)"


def turn(browser, text=None):
    """Sends a message, or the example; returns how many tokens of the prompt came from where."""
    before = browser.run(f"{TURNS}.length")
    if text is None:
        browser.click("#example")
    else:
        browser.write("#message", text)
    browser.click("#send")
    browser.until(f"{TURNS}.length === {before + 1} && document.querySelector('#stop').hidden")
    told = browser.run(f"({{...{LAST}.dataset}})")
    return {source: int(told[source]) for source in ("device", "host", "store", "computed")}


def push_out(server):
    """Other texts, more than the device tier holds."""
    for number in range(6):
        prompt = [200 + (997 * number + 31 * i) % 3800 for i in range(1500)]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()


def shown(browser):
    """The numbers of the page that /metrics has too, by name and labels as `samples_of` writes them."""
    script = (
        "[...document.querySelectorAll('[data-metric]')].map((e) => [e.dataset.metric, +e.dataset.value])"
    )
    numbers = {}
    for metric, value in browser.run(script):
        name, _, labels = metric.partition("{")
        pairs = [each.split("=") for each in labels.rstrip("}").split(",") if each]
        numbers[name + str(sorted((label, json.loads(text)) for label, text in pairs))] = value
    return numbers


def same_numbers(browser, server):
    """Waits until the page shows what /metrics says: the feed comes once a second."""

    def equal():
        page, metrics = shown(browser), samples_of(httpx.get(f"{server.url}/metrics").text)
        assert page.keys() <= metrics.keys()
        return page == {name: metrics[name] for name in page} and page

    return until(equal, "the page shows the numbers of /metrics")


def fill(server):
    """Minutes as a busy server has them: conversations that go on, some of them pushed out meanwhile."""
    random = Random(1)
    talks = [[200 + random.randrange(3800) for _ in range(random.randrange(300, 1500))] for _ in range(24)]
    until_s = time.monotonic() + 200
    while time.monotonic() < until_s:
        talk = talks[int(random.expovariate(0.25)) % len(talks)]  # some are asked more often than others
        talk += [200 + random.randrange(3800) for _ in range(random.randrange(10, 40))]
        body = {"input_ids": talk[-2000:], "sampling_params": {"max_new_tokens": 8}}
        httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()
        if random.random() < 0.02:
            httpx.post(f"{server.url}/flush_cache", params={"timeout": 10}).raise_for_status()


def check_silence(browser):
    """No error, no warning, no violation of the content policy, no request to another host."""
    assert {httpx.URL(url).host for url in browser.requests} == {"127.0.0.1"}
    assert browser.complaints == []


def test_a_conversation_is_held_pushed_out_and_restored_and_the_page_shows_it(tmp_path):
    """One story, because the server and the browser take seconds to start."""
    memory = ("--device-memory", "2MiB", "--host-memory", "24MiB")  # others push a conversation out
    store = Path("/tmp/store") if PICTURES else tmp_path / "store"  # the pictures show where it is
    with running(*memory, "--store", f"file://{store}?size=64MiB") as server, browsing() as browser:
        browser.open(f"{server.url}/")
        browser.until("document.querySelector('#state').textContent === 'live'")
        converse(browser, server)
        check_numbers(browser, server)
        check_explanations(browser, server)
        check_stop(browser)
        take_pictures(browser, server, tmp_path)
        check_calls(browser, server)
        check_silence(browser)


def test_the_page_tells_how_many_pages_are_sparse():
    memory = ("--device-memory", "24MiB", "--host-memory", "64MiB", "--sparse", "always")
    with running(*memory) as server, browsing() as browser:
        body = {
            "input_ids": [200 + 31 * i % 3800 for i in range(1500)],
            "sampling_params": {"max_new_tokens": 12},
        }
        httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()
        browser.open(f"{server.url}/")
        browser.until("document.querySelector('#state').textContent === 'live'")
        page = same_numbers(browser, server)
        assert page["tiercel_sparse_entries_hit_total[]"] > 0 and "tiercel_running_pages_sparse[]" in page
        read = "document.querySelector('#tier-device [data-row=\"Read on the host\"] dd').textContent"
        assert browser.run(read).endswith("iB")
        check_silence(browser)


def converse(browser, server):
    first, second = turn(browser), turn(browser)
    assert first["computed"] > 256 and sum(first.values()) == first["computed"]
    assert (second["device"], second["host"], second["store"]) == (256, 0, 0)
    push_out(server)
    third = turn(browser, "Which record has night?")
    assert (third["device"], third["host"], third["store"]) == (0, 256, 0)
    stats = f"{server.url}/v1/cache/stats"
    until(lambda: not httpx.get(stats).json()["store"]["queued_bytes"], "everything is in the store")
    httpx.post(f"{server.url}/flush_cache", params={"timeout": 10}).raise_for_status()
    fourth = turn(browser, "Which record has king?")
    assert (fourth["device"], fourth["host"], fourth["store"]) == (0, 0, 256)
    answers = browser.run("[...document.querySelectorAll('.answer')].map((e) => e.textContent)")
    assert answers == ["fire water", "silver gold", "night dark", "king sword"]


def check_numbers(browser, server):
    page = same_numbers(browser, server)
    assert len(page) > 25
    hits = [page[f"tiercel_hit_tokens_total[('tier', '{tier}')]"] for tier in ("device", "host", "store")]
    assert hits == [256, 256, 256]
    assert browser.run("document.querySelector('#saved-tokens').textContent") == "768"
    stats = httpx.get(f"{server.url}/v1/cache/stats").json()
    assert stats["counters"]["tokens_replayed"] == 0
    for tier in ("device", "host"):
        used = browser.run(f"+document.querySelector('#tier-{tier} [data-part=used]').dataset.value")
        assert used == sum(stats["cached_bytes"][tier].values()) > 0
    for chart in ("share", "first"):
        count = f"document.querySelector('#{chart}-chart').querySelectorAll('rect, circle').length"
        assert browser.run(count) >= 4, "one for each source"


def check_explanations(browser, server):
    name = browser.run("document.querySelector('#requests details').textContent.match(/id (req-\\w+)/)[1]")
    summary = httpx.get(f"{server.url}/v1/cache/explain/{name}").json()["summary"]
    assert summary.startswith("reused 256 of ")
    words = f"{summary[0].upper()}{summary[1:]}."
    browser.click("#requests details summary")
    assert browser.run("document.querySelector('#requests details[open] p').textContent") == words
    browser.run(f"{LAST}.querySelector('summary').click()")
    browser.until(f"{LAST}.querySelector('p').textContent === {json.dumps(words)}")


def check_stop(browser):
    """An answer that is stopped ends, and the conversation goes on."""
    browser.write("#message", "Tell me of the king.")
    browser.run("document.querySelector('#chat').requestSubmit(); document.querySelector('#stop').click()")
    browser.until("document.querySelector('.answer.failed')?.textContent.endsWith('(stopped)')")
    assert turn(browser, "Which record has fire?")["device"] == 256


def take_pictures(browser, server, folder):
    if PICTURES:
        folder = DOCS
        fill(server)
        browser.until("document.querySelectorAll('#requests details').length >= 50")
    end = "scrollTo(0, 1e6); document.querySelector('#turns').scrollTop = 1e6"
    for name, scroll, size in (
        ("page-light.png", "scrollTo(0, 0)", {"width": 1180, "height": 860}),
        ("page-dark.png", end, {"width": 1180, "height": 860, "dark": True}),
        ("page-phone.png", "scrollTo(0, 0)", {"width": 390, "height": 844}),
    ):
        browser.picture(folder / name, scroll, **size)
        assert (folder / name).stat().st_size < 150_000
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"


def check_calls(browser, server):
    browser.open(f"{server.url}/docs")
    count = sum(map(len, httpx.get(f"{server.url}/openapi.json").json()["paths"].values()))
    browser.until(f"document.querySelectorAll('.call').length === {count}")
    text = browser.run("document.body.textContent")
    assert "/v1/chat/completions" in text and "max_completion_tokens" in text


def test_a_server_with_keys_asks_for_them_and_the_page_keeps_them_nowhere():
    options = ServerOptions(loopback=True, api_key=("user",), admin_key="admin")
    with served(ScriptedService(), options) as url, browsing() as browser:
        browser.open(f"{url}/")
        for key, why in (("wrong", ""), ("admin", "The admin key is missing or wrong.")):
            browser.until("!document.querySelector('#ask-key').hidden")
            assert browser.run("document.querySelector('#ask-key-why').textContent") == why
            browser.write("#key", key)
            browser.run("document.querySelector('#ask-key').requestSubmit()")
        browser.until("document.querySelector('#state').textContent === 'live'")
        browser.write("#message", "Hello")
        browser.click("#send")
        browser.until("document.querySelector('#user-key')")  # the admin key gives no answers
        browser.write("#user-key", "user")
        browser.run("document.querySelector('#turns form').requestSubmit()")
        browser.until(f"{TURNS}.length === 1")
        assert (
            browser.run("document.querySelector('#turns .question + .answer').textContent") == "Hello world!"
        )
        assert browser.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        refused = [each for each in browser.complaints if "401" in each]
        assert len(refused) == 3, "the feed twice, the chat once"
        browser.complaints = [each for each in browser.complaints if each not in refused]
        check_silence(browser)
