"""Goal: a person who opens the page sees the cache at work. Method: a real browser on a real server.

`TIERCEL_PICTURES=1` writes the pictures of docs/page.md.
"""

import ast
import json
import os
import re
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import httpx

from tests.server.scripted import ScriptedService, served
from tests.server.test_status import samples_of
from tests.servers import free_port
from tests.wait import until
from tests.whole.browser import browsing
from tests.whole.process import Server, running
from tests.whole.test_operations import tenants
from tiercel.server.http.tenants import digest_of
from tiercel.server.live.history import SPANS
from tiercel.server.live.page import WEB
from tiercel.server.options import ServerOptions
from tiercel.threads import start

PICTURES = bool(os.environ.get("TIERCEL_PICTURES"))
DOCS = Path(__file__).parents[2] / "docs" / "figures"
SECTIONS = ("evictions", "trouble", "speculation", "peers", "stages", "memory", "tenants")
TURNS = "document.querySelectorAll('.source')"
CHARTS = "[...document.querySelectorAll('.charts [data-part][data-value]')]"
QUANTILES = (
    "Object.fromEntries([...document.querySelectorAll('figure [data-part^=p][data-value]')]"
    ".map((e) => [`#${e.closest('figure').querySelector('svg').id} ${e.dataset.part}`, +e.dataset.value]))"
)
GROWN = "[...document.querySelectorAll('[data-grown]')]"
LOOK = """Promise.all([import('./past.js'), import('./feed.js')]).then(([{ look }, { nowS }]) => {
    const now = 10 * Math.floor(nowS() / 10);
    const steps = { [now]: { n: 1 }, [now - 290]: { n: 2 }, [now - 300]: { n: 4 } };
    const server = { started_s: 0, spans: { '5 minutes': { step_s: 10, steps: 30 } } };
    return [look({ server, history: { '5 minutes': steps } })];
})"""
ROWS = "[...document.querySelectorAll('#tenants tbody tr')]"
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


def metrics_of(server, key=""):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return samples_of(httpx.get(f"{server.url}/metrics", headers=headers).text)


def is_shown(browser, name):
    return browser.run(f"!document.querySelector('#{name}').hidden")


def histogram_quantile(share, metrics, name):
    """Of all histograms with this name together, as Prometheus computes it."""
    buckets = {}
    for sample, count in metrics.items():
        if sample.startswith(f"{name}_bucket["):
            bound = float(dict(ast.literal_eval(sample[len(name) + 7 :]))["le"])
            buckets[bound] = buckets.get(bound, 0) + count
    rank, below, low = share * max(buckets.values()), 0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= rank:
            return low if bound == inf else low + (bound - low) * (rank - below) / (count - below)
        below, low = count, bound
    raise AssertionError("the last bucket has all values")


def same_numbers(browser, server, key=""):
    """Waits until the page shows what /metrics says: the feed comes once a second."""

    def equal():
        page, metrics = shown(browser), metrics_of(server, key)
        assert page.keys() <= metrics.keys()
        return page == {name: metrics[name] for name in page} and page

    return until(equal, "the page shows the numbers of /metrics")


def fill(server):
    """Minutes as a busy server has them: conversations that go on, some of them pushed out meanwhile."""
    random = Random(1)
    talks = [[200 + random.randrange(3800) for _ in range(random.randrange(300, 1500))] for _ in range(24)]
    until_s = time.monotonic() + 290
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
        check_past(browser, server)
        check_explanations(browser, server)
        check_stop(browser)
        take_pictures(browser, server, tmp_path)
        check_calls(browser, server)
        check_silence(browser)


PROMPT = [200 + 31 * i % 3800 for i in range(1500)]


def generate(server, key):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/generate", json=body, headers=headers, timeout=60)


def test_sparse_pages_peers_and_tenants_are_shown_where_there_are_such(tmp_path):
    address, secret = f"127.0.0.1:{free_port()}", ("--share-key", "a key for tests")
    memory = ("--device-memory", "24MiB", "--host-memory", "64MiB", *secret)
    keys = tmp_path / "keys.toml"
    keys.write_text(tenants(a="", b="requests-per-minute = 1", c='cache-memory = "1MiB"'))
    access = ("--keys-file", keys, "--api-key", "key-of-no-tenant", "--admin-key", "key-of-admin")
    read = ("--sparse", "always", "--fetch", "wait", "--peer", f"peer://{address}")
    starting = start(lambda: Server(*memory, "--share-pages", address), "first")
    with running(*memory, *access, *read) as server, browsing() as browser:
        other = starting.result()
        try:
            generate(other, "none").raise_for_status()
            saved = f"{other.url}/v1/cache/stats"
            until(lambda: httpx.get(saved).json()["counters"]["pages_saved"] >= 11, "the peer has the pages")
            statuses = [generate(server, f"key-{name}").status_code for name in ("of-no-tenant", *"aabb")]
            assert statuses == [200, 200, 200, 200, 429]
            check_tenants_and_peers(browser, server)
            browser.open(f"{other.url}/")
            page = same_numbers(browser, other)
            assert page["tiercel_shared_bytes_sent_total[]"] > 0
            assert is_shown(browser, "peers") and not is_shown(browser, "tenants")
        finally:
            assert other.stop()[0] == 0


def check_tenants_and_peers(browser, server):
    browser.open(f"{server.url}/")
    browser.until("!document.querySelector('#ask-key').hidden")
    browser.write("#key", "key-of-admin")
    browser.run("document.querySelector('#ask-key').requestSubmit()")
    browser.until("document.querySelector('#state').textContent === 'live'")
    page = same_numbers(browser, server, "key-of-admin")
    assert page["tiercel_sparse_entries_hit_total[]"] > 0 and "tiercel_running_pages_sparse[]" in page
    read = "document.querySelector('#tier-device [data-row=\"Read on the host\"] dd').textContent"
    assert browser.run(read).endswith("iB")
    assert page["tiercel_store_peer_bytes_read_total[('peer', '1')]"] > 0
    assert [page[f"tiercel_tenant_requests_total[('tenant', '{name}')]"] for name in "abc"] == [2, 1, 0]
    assert page["tiercel_tenant_bytes_most[('tenant', 'c')]"] == 2**20
    rows = f"{ROWS}.map((row) => [...row.children].slice(0, 6).map((e) => e.textContent))"
    assert browser.run(rows) == [
        ["a", "2", "3,000", "1,408 · 47 %", "24", "0"],
        ["b", "1", "1,500", "0 · 0 %", "12", "1"],
        ["c", "0", "0", "0 · –", "0", "0"],
    ]
    admin = {"authorization": "Bearer key-of-admin"}
    with httpx.stream("GET", f"{server.url}/feed", headers=admin) as answer:
        first = next(answer.iter_lines())
    assert '"tenants":{"a":' in first
    secrets = [f"key-{name}" for name in ("a", "b", "c", "of-no-tenant", "of-admin")]
    assert not any(word in first for each in secrets for word in (each, digest_of(each.encode())))
    assert "a key for tests" not in first
    (refused,) = browser.complaints
    assert "401" in refused
    browser.complaints.clear()
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


def check_past(browser, server):
    """The server is younger than every span, so what grew in it is what was counted since the start."""
    httpx.post(f"{server.url}/generate", json={})
    refused = """document.querySelector('#trouble [data-row="400 /generate"] dd')"""
    browser.until(f"{refused}.textContent === '1'")
    page = same_numbers(browser, server)
    assert page["tiercel_http_requests_total[('call', '/generate'), ('status', '400')]"] == 1
    assert page["tiercel_engine_guesses_total[]"] > 0
    assert page["tiercel_device_memory_bytes[('what', 'weights')]"] > 0
    assert sum(count for name, count in page.items() if name.startswith("tiercel_evicted_total")) > 0
    for name, span in SPANS.items():
        browser.click(f"#spans [value='{name}']")
        assert browser.run("document.querySelector('#evictions small').textContent") == f"last {name}"
        minutes = span.step_s * span.steps // 60
        oldest = f"−{minutes} min" if minutes <= 60 else f"−{minutes // 60} h"
        assert oldest in browser.run("document.querySelector('#first-chart').textContent")
        pairs = browser.run(f"{GROWN}.map((e) => [+e.dataset.grown, +e.dataset.value])")
        assert len(pairs) > 5 and all(grew == counted for grew, counted in pairs)
        check_charts(browser, metrics_of(server))
    browser.click("#spans [value='5 minutes']")
    here = [name for name in SECTIONS if is_shown(browser, name)]
    assert here == ["evictions", "trouble", "speculation", "memory"]


def check_charts(browser, metrics):
    told = browser.run(f"Object.fromEntries({CHARTS}.map((e) => [e.dataset.part, +e.dataset.value]))")
    asked, drawn = (metrics[f"tiercel_{name}_total[]"] for name in ("tokens_asked", "engine_tokens_drawn"))
    calls = [name for name in metrics if name.startswith("tiercel_http_requests_total[")]
    answers = [metrics[name] for name in calls if "'/generate'" in name or "'/v1/chat" in name]
    assert told["share"] == 768 / asked
    seconds = 768 / told["reused"]
    assert 0 < seconds < 300
    rates = {name: round(told[name] * seconds) for name in ("computed", "answers", "answered")}
    assert rates == {"computed": asked - 768, "answers": drawn, "answered": sum(answers)}
    for chart, name in (("first", "first_token_by_source"), ("between", "inter_token")):
        assert browser.run(f"document.querySelectorAll('#{chart}-chart circle').length") > 1
        for share in (0.5, 0.99):
            part = f"#{chart}-chart p{100 * share:.0f}"
            own = browser.run(f"{QUANTILES}[{json.dumps(part)}]")
            assert abs(own - histogram_quantile(share, metrics, f"tiercel_{name}_seconds")) < 1e-9


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
    past = "document.querySelector('.past').scrollIntoView()"
    end = "scrollTo(0, 1e6); document.querySelector('#turns').scrollTop = 1e6"
    for name, scroll, size in (
        ("page-light.png", "scrollTo(0, 0)", {"width": 1180, "height": 1272}),
        ("page-dark.png", end, {"width": 1180, "height": 1190, "dark": True}),
        ("page-phone.png", past, {"width": 390, "height": 844}),
    ):
        browser.picture(folder / name, scroll, **size)
        if PICTURES:
            with_few_colours(folder / name)
        # on a phone the window grows with what is too wide, so `innerWidth` would say nothing
        assert browser.run("document.documentElement.scrollWidth") <= size["width"], "nothing is cut off"


def with_few_colours(path):
    """A third of the bytes. The page's own colours stay as they are, and those that are frequent."""
    from PIL import Image  # comes with matplotlib

    whole = Image.open(path).convert("RGB")
    css, counted = (WEB / "page.css").read_text(), whole.getcolors(2**24)
    assert counted
    own = [tuple(bytes.fromhex(each)) for each in re.findall(r"#([0-9a-f]{6})", css)]
    often = [Image.new("RGB", (1, 1), colour).tobytes() for _, colour in sorted(counted, reverse=True)[:256]]
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for colour in [*own, *often][:256] for channel in colour])
    whole.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def check_calls(browser, server):
    browser.open(f"{server.url}/docs")
    count = sum(map(len, httpx.get(f"{server.url}/openapi.json").json()["paths"].values()))
    browser.until(f"document.querySelectorAll('.call').length === {count}")
    text = browser.run("document.body.textContent")
    assert "/v1/chat/completions" in text and "max_completion_tokens" in text


def test_a_server_with_keys_asks_for_them_and_the_page_keeps_them_nowhere():
    options = ServerOptions(loopback=True, api_key=("user",), admin_key="admin")

    class Staged(ScriptedService):
        async def stats(self):
            return replace(await super().stats(), stages={"0": {"busy_s": 1.5}})

    with served(Staged(), options) as url, browsing() as browser:
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
        row = "document.querySelector('#stages [data-row] dd').textContent.split(' · ')"
        share, busy = browser.run(row)
        assert share.endswith(" %") and busy == "1.50 s"
        # the newest step, the oldest one of the span, and one that is too old
        assert browser.run(f"{LOOK}.then(([past]) => [past.all.n, Math.ceil(past.seconds / 10)])") == [3, 30]
        refused = [each for each in browser.complaints if "401" in each]
        assert len(refused) == 3, "the feed twice, the chat once"
        browser.complaints = [each for each in browser.complaints if each not in refused]
        check_silence(browser)
