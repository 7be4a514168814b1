"""Goal: every metric says in words what it counts, has one name, and is documented. Method: all names and
texts that can be exported, against each other and against docs/operations.md; a page read by Prometheus' own
parser."""

import re
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.server.scripted import STORE, ScriptedService, call
from tiercel.cache import core, store_tier
from tiercel.engine import scheduler
from tiercel.server.http.metric_families import FAMILIES, family_of
from tiercel.server.http.metrics import TIMES

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
OWN = {
    *("tiercel_http_requests_total", "tiercel_http_requests_open", "tiercel_build_info"),
    *("tiercel_http_request_seconds", "tiercel_time_to_first_token_seconds"),
    *(f"tiercel_tenant_{what}_total" for what in ("tokens", "refused", "requests")),
}
"""Of the server itself."""


def every_name() -> set[str]:
    families = (family for family in FAMILIES.values() if family is not None)
    counted = {f"tiercel_{each.name}{'_total' if each.grows else ''}" for each in families}
    return counted | {f"tiercel_{name}_seconds" for name, _, _ in TIMES.values()} | OWN


def helps(page: str) -> dict[str, str]:
    return dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))


def test_every_metric_that_can_be_exported_is_documented_and_no_other():
    documented = re.findall(r"^\| `(tiercel_\w+)", DOCUMENT.read_text(), re.MULTILINE)
    assert Counter(documented).most_common(1)[0][1] == 1, "each once"
    assert set(documented) == every_name()


def test_no_two_metrics_have_the_same_name_or_the_same_words():
    families = [family for family in FAMILIES.values() if family is not None]
    assert Counter(family.name for family in families).most_common(1)[0][1] == 1
    assert Counter(family.about for family in families).most_common(1)[0][1] == 1
    for family in families:
        assert len(family.about.split()) >= 4 and family.about[0].isupper(), family.name
        assert family.about.lower().replace(" ", "_") != family.name


def test_every_help_on_the_page_is_a_sentence_of_its_own():
    page = call("GET", "/metrics", ScriptedService(store=STORE)).text
    texts = helps(page)
    assert len(texts) > 25 and Counter(texts.values()).most_common(1)[0][1] == 1
    assert all(len(text.split()) >= 4 and text.endswith(".") for text in texts.values())
    assert "tokens" in texts["tiercel_queue_tokens"].lower()
    families = list(text_string_to_metric_families(page))
    assert {family.name for family in families} >= {"process_cpu_seconds", "process_resident_memory_bytes"}
    assert not [name for name in texts if name.endswith("_created")]
    (build,) = [family for family in families if family.name == "tiercel_build_info"]
    (sample,) = build.samples
    assert sample.value == 1 and set(sample.labels) == {"version", "python", "torch"}


def test_a_counter_ends_with_total_and_says_since_when():
    page = call("GET", "/metrics", ScriptedService(store=STORE)).text
    types = dict(re.findall(r"^# TYPE (tiercel_\S+) (\w+)$", page, re.MULTILINE))
    for name, kind in types.items():
        assert (kind == "counter") == name.endswith("_total"), name
        assert (kind == "gauge") == ("since the" not in helps(page)[name]), name


def test_everything_that_is_counted_has_a_metric_or_another_one_tells_it():
    for way, names in (
        ("counters", core.COUNTED),
        ("engine", scheduler.COUNTED),
        ("store.counters", store_tier.COUNTED),
    ):
        assert {f"{way}.{name}" for name in names} <= FAMILIES.keys()


def test_a_number_finds_its_metric_by_its_way():
    family, labels = family_of(("evicted", "host", "tails", "room"))
    assert (family.name, labels) == ("evicted", ("host", "tails", "room"))
    assert family_of(("counters", "tokens_host")) is None, "hit_tokens tells it"
    assert family_of(("counters", "unheard of")) is None
    assert family_of(("store", "store", "shards"))[1] == ("shards",)
    assert family_of(("store", "store", "peers", "1", "reads"))[1] == ("1",)
