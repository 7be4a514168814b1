"""Goal: a tenant has what its table says, and nothing of another tenant. Method: files, a clock that is set,
and calls with keys."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.scripted import ScriptedService, talking
from tests.server.test_status import samples_of
from tiercel.errors import ConfigError
from tiercel.server.http.tenants import Tenant, TenantLimits, Tenants, digest_of
from tiercel.server.options import ServerOptions


def table(name, more="", key=None):
    return f'["{name}"]\nsha256 = ["{digest_of((key or name).encode())}"]\n{more}\n'


@pytest.fixture
def made(tmp_path):
    def make(*tables) -> Tenants:
        path: Path = tmp_path / "keys.toml"
        path.write_text("".join(tables))
        return Tenants(path)

    return make


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def limited(**limits):
    clock = Clock()
    return Tenant("a", TenantLimits(**limits), clock), clock


def test_requests_in_flight_are_refused_above_the_limit_until_one_ends():
    tenant, _ = limited(requests_in_flight=2)
    assert tenant.begin() is None and tenant.begin() is None
    over = tenant.begin()
    assert (over.limit, over.most) == ("requests-in-flight", 2)
    tenant.end(0)
    assert tenant.begin() is None


def test_requests_per_minute_come_back_evenly_and_are_told_when():
    tenant, clock = limited(requests_per_minute=6)
    for _ in range(6):
        assert tenant.begin() is None
    assert tenant.begin().retry_s == 11
    clock.now_s += 9
    assert tenant.begin().limit == "requests-per-minute"
    clock.now_s += 1.5
    assert tenant.begin() is None and tenant.begin() is not None
    clock.now_s += 3600
    assert [tenant.begin() is None for _ in range(7)] == [True] * 6 + [False], "an hour saves up one minute"


def test_tokens_are_taken_when_an_answer_ends_and_the_next_request_waits_for_them():
    tenant, clock = limited(tokens_per_minute=60)
    assert tenant.begin() is None
    tenant.end(tokens=119)
    over = tenant.begin()
    assert (over.limit, over.retry_s) == ("tokens-per-minute", 61)
    clock.now_s += 60
    assert tenant.begin() is None


def test_a_limit_that_stays_the_same_goes_on_when_the_file_is_read_again(made):
    tenants = made(table("a", "requests-per-minute = 1"), table("b"))
    assert tenants.find(b"a").begin() is None
    made(table("a", "requests-per-minute = 1\nrequests-in-flight = 9", key="new"))
    assert tenants.read_again()
    assert tenants.find(b"a") is None and tenants.find(b"b") is None
    assert tenants.find(b"new").begin().limit == "requests-per-minute"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "x: is no table"),
        ("[a]", "a: has no key"),
        ('[a]\nsha256 = "secret"', "a: sha256 must be 64"),
        (f'[a]\nsha256 = "{digest_of(b"")}"', "a: sha256 is that of an empty key"),
        (table("a b"), "a b: a name has"),
        (table("a", "requests-per-hour = 1"), "requests_per_hour is not known"),
        (table("a", "requests-in-flight = 0"), "requests-in-flight = 0 must be"),
        (table("a", 'tokens-per-minute = "many"'), "tokens-per-minute = 'many' must be"),
        (table("a", 'cache-memory = "much"'), "cache-memory"),
        (table("a") + table("b", key="a"), "have one key"),
        ("[a", "is not TOML"),
    ],
)
def test_a_file_that_can_not_be_meant_is_named_and_changes_nothing(made, caplog, text, says):
    tenants = made(table("old"))
    made_again = pytest.raises(ConfigError, match=says)
    with made_again:
        made(text)
    assert not tenants.read_again() and says in caplog.text
    assert tenants.find(b"old") is not None


def headers(key):
    return {"authorization": f"Bearer {key}"}


def test_every_ask_of_a_tenant_is_in_its_namespace_whatever_its_salt(made):
    service = ScriptedService()
    options = ServerOptions(tenants=made(table("a"), table("b")), api_key=("plain",))
    with talking(service, options) as talk:
        for key, salt in (("a", None), ("a", "s"), ("b", "a"), ("plain", "tenant")):
            for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
                message = [{"role": "user", "content": "x"}]
                body = {"text": "x"} if path == "/generate" else {"prompt": "x", "messages": message}
                body.pop("messages" if "chat" not in path else "prompt", None)
                answer = talk("POST", path, json=body | {"cache_salt": salt}, headers=headers(key))
                assert answer.status_code == 200, answer.text
        assert talk("POST", "/generate", json={"text": "x"}, headers=headers("c")).status_code == 401
    assert [(ask.namespace, ask.tenant) for ask in service.asks[::3]] == [
        (("tenant", "a"), "a"),
        (("tenant", "a", "s"), "a"),
        (("tenant", "b", "a"), "b"),
        (("tenant",), ""),
    ]
    assert service.asks[0].namespace == service.asks[1].namespace == service.asks[2].namespace


def test_a_request_over_a_limit_is_a_429_that_names_it_and_the_engine_is_not_asked(made):
    service = ScriptedService()
    tenants = made(table("a", "requests-per-minute = 1"), table("b"))
    options = ServerOptions(tenants=tenants, api_key=("own",))
    with talking(service, options) as talk:
        assert talk("POST", "/generate", json={"text": "x"}, headers=headers("a")).status_code == 200
        refused = talk("POST", "/generate", content=b"{", headers=headers("a"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
        assert refused.json()["error"]["code"] == "requests_per_minute"
        assert "requests-per-minute = 1" in refused.json()["error"]["message"]
        assert talk("GET", "/v1/models", headers=headers("a")).status_code == 200
        assert talk("POST", "/generate", json={"text": "x"}, headers=headers("b")).status_code == 200
        samples = samples_of(talk("GET", "/metrics", headers=headers("own")).text)
    assert len(service.asks) == 2
    refusals = "tiercel_tenant_refused_total[('limit', 'requests-per-minute'), ('tenant', '%s')]"
    assert (samples[refusals % "a"], samples[refusals % "b"]) == (1, 0)
    assert samples["tiercel_tenant_tokens_total[('tenant', 'b'), ('tokens', 'completion')]"] == 3


def test_metrics_name_only_the_tenants_that_a_key_may_see(made):
    options = ServerOptions(tenants=made(table("a"), table("b")), api_key=("own",), admin_key="admin")
    with talking(ScriptedService(), options) as talk:
        pages = {
            key: talk("GET", "/metrics", headers=headers(key)) for key in ("own", "admin", "a", "b", "c")
        }
        pages[""] = talk("GET", "/metrics")
    assert pages.pop("c").status_code == 401
    named = {}
    for key, page in pages.items():
        assert samples_of(page.text)["tiercel_pages_saved_total[]"] == 4
        families = text_string_to_metric_families(page.text)
        labels = [sample.labels for family in families for sample in family.samples]
        named[key] = {each["tenant"] for each in labels if "tenant" in each}
    assert named == {"own": {"a", "b"}, "admin": {"a", "b"}, "a": {"a"}, "b": {"b"}, "": set()}


def test_what_a_request_took_is_given_back_however_it_ends(made):
    tenants = made(table("a", "requests-in-flight = 1"))
    service = ScriptedService(fail_first=ValueError("a bug"))
    with talking(service, ServerOptions(tenants=tenants)) as talk:
        for body in ({"text": "x"}, {"text": 5}, {"text": "x", "stream": True}):
            assert talk("POST", "/generate", json=body, headers=headers("a")).status_code in (400, 500)
    assert tenants.find(b"a").running == 0


def test_tenants_make_no_admin_calls_and_explain_only_their_own(made):
    tenants = made(table("a"), table("b"))
    with talking(ScriptedService(), ServerOptions(tenants=tenants, loopback=True)) as talk:
        assert talk("POST", "/flush_cache", headers=headers("a")).status_code == 403
        name = talk("POST", "/generate", json={"text": "x"}, headers=headers("a")).headers["x-request-id"]
        for key, status in (("a", 200), ("b", 404)):
            told = talk("GET", f"/v1/cache/explain/{name}", headers=headers(key))
            assert told.status_code == status
