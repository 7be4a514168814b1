"""Goal: a server is run as an operator runs one. Method: one real server from a configuration file, with TLS,
tenants, JSON logs and a collector of traces; then everything it said is read."""

import json
import signal
import ssl
import subprocess
from contextlib import closing

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.collector import attributes, collecting
from tests.wait import until
from tests.whole.process import Server
from tiercel.server.http.tenants import digest_of

PROMPT = "Once upon a time there was a very long prompt that is asked again and again. " * 20
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ORIGIN = "https://app.example"


def tenants(**limits):
    """A file with tenants whose keys are key-NAME."""
    return "".join(
        f'[{name}]\nsha256 = "{digest_of(f"key-{name}".encode())}"\n{more}\n' for name, more in limits.items()
    )


class Operated:
    """The server, what it was told, and what it said."""

    def __init__(self, folder, collector):
        self.collector = collector
        self.keys = folder / "keys.toml"
        self.keys.write_text(tenants(a="requests-per-minute = 100", b='cache-memory = "0"', c=""))
        cert, key = folder / "cert.pem", folder / "key.pem"
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key]
        names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*make, "-out", cert, *names], check=True, capture_output=True)
        config = folder / "tiercel.toml"
        config.write_text(
            f'device-memory = "24MiB"\nhost_memory = "64MiB"\nkeys-file = "{self.keys}"\n'
            f'log-format = "json"\ntls-cert = "{cert}"\ntls-key = "{key}"\ncors-origin = ["{ORIGIN}"]\n'
            'speculate = "off"\napi-key = ["key-of-no-tenant"]\n'
        )
        self.server = Server("--config", str(config))
        trust = ssl.create_default_context(cafile=str(cert))
        self.client = httpx.Client(base_url=self.server.url, verify=trust, timeout=60)
        self.before = self.samples()
        traced = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "second"}
        self.first, self.second = self.ask("a"), self.ask("a", headers=traced)

    def ask(self, tenant, **more):
        body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        headers = {"authorization": f"Bearer key-{tenant}"} | more.pop("headers", {})
        return self.client.post("/v1/completions", json=body | more, headers=headers)

    def reads_keys(self, tenant):
        """Have the file of keys read again. Is this a tenant's key?"""
        self.server.process.send_signal(signal.SIGHUP)
        return self.ask(tenant).status_code == 200

    def samples(self):
        page = self.client.get("/metrics", headers={"authorization": "Bearer key-of-no-tenant"}).text
        families = list(text_string_to_metric_families(page))
        assert all(family.samples for family in families)
        return {
            sample.name + str(sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture(scope="module")
def operated(tmp_path_factory):
    with collecting() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        environment.setenv("TIERCEL_STOER", "memory:")
        own = Operated(tmp_path_factory.mktemp("operated"), collector)
        with closing(own.client):
            yield own
        if own.server.process.poll() is None:
            own.server.stop()


def test_tenants_share_nothing_and_one_without_memory_keeps_nothing(operated):
    def cached(answer):
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def held(tenant):
        samples = operated.samples()
        return sum(
            samples[f"tiercel_tenant_{tier}_bytes[('tenant', '{tenant}')]"] for tier in ("device", "host")
        )

    assert operated.before["tiercel_queue_time_seconds_count[]"] == 0, "it is there before the first request"
    first, again, forged = operated.first, operated.second, operated.ask("c", cache_salt="a")
    assert (cached(first), cached(forged)) == (0, 0) and cached(again) > 0
    assert first.json()["choices"] == again.json()["choices"]
    for _ in range(2):
        assert cached(operated.ask("b")) == 0
        until(lambda: held("b") == 0, "copies of what b computed have ended, and nothing is kept")
    samples = operated.samples()
    assert held("a") > 0
    assert samples["tiercel_tenant_bytes_most[('tenant', 'b')]"] == 0
    assert samples["tiercel_tenant_tokens_total[('tenant', 'a'), ('tokens', 'cached')]"] == cached(again)
    assert samples["tiercel_tenant_requests_total[('tenant', 'a')]"] == 2
    assert samples["tiercel_queue_time_seconds_count[]"] == 5
    assert samples["tiercel_inter_token_seconds_count[]"] == 5 * 4
    assert samples["tiercel_first_token_by_source_seconds_count[('source', 'device')]"] == 1
    assert samples["tiercel_first_token_by_source_seconds_count[('source', 'computed')]"] == 4
    assert samples["tiercel_first_token_by_source_seconds_count[('source', 'store')]"] == 0


def test_a_request_is_traced_from_its_callers_span_to_its_last_token(operated):
    collector = operated.collector
    root_name = "POST /v1/completions"
    until(lambda: [s for s in collector.named(root_name) if s.trace_id.hex() == TRACE], "the span is sent")
    spans = {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE}
    root = spans.pop(root_name)
    assert root.parent_span_id.hex() == SPAN and collector.services == {"tiercel"}
    assert set(spans) == {"queue", "match", "prefill", "decode"}
    assert all(span.parent_span_id == root.span_id for span in spans.values())
    times = [
        time for name in spans for time in (spans[name].start_time_unix_nano, spans[name].end_time_unix_nano)
    ]
    assert times == sorted(times) and root.start_time_unix_nano <= times[0]
    told, match, prefill = (attributes(each) for each in (root, spans["match"], spans["prefill"]))
    assert (told["tiercel.request_id"], told["tiercel.tenant"]) == ("second", "a")
    assert (told["gen_ai.usage.output_tokens"], told["http.response.status_code"]) == (5, 200)
    assert told["tiercel.tokens.cached"] == prefill["tiercel.tokens.device"] > 0
    assert (
        prefill["tiercel.tokens.device"] + prefill["tiercel.tokens.computed"]
        == match["tiercel.tokens.prompt"]
    )
    stages = operated.client.get("/v1/cache/explain/second", headers={"authorization": "Bearer key-a"}).json()
    assert list(stages["stages_ms"]) == ["queue", "match", "prefill", "decode"]


def test_a_page_of_a_named_origin_may_call_and_others_may_not(operated):
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    allowed = operated.client.options("/v1/completions", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    other = operated.client.options("/v1/completions", headers=asked | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert operated.ask("a", headers={"origin": ORIGIN}).headers["access-control-allow-origin"] == ORIGIN
    flush = operated.client.post("/flush_cache", headers={"origin": ORIGIN, "authorization": "Bearer key-a"})
    assert flush.status_code == 403


def test_a_signal_has_the_keys_read_again_and_a_broken_file_changes_nothing(operated):
    operated.keys.write_text(tenants(a="requests-per-minute = 1", d=""))
    until(lambda: operated.reads_keys("d"), "the new tenant is known")
    assert operated.ask("c").status_code == 401
    operated.ask("a")
    refused = operated.ask("a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "requests_per_minute")
    assert "requests-per-minute = 1" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    operated.keys.write_text("[a]\n")
    assert operated.reads_keys("d") and operated.reads_keys("d")


def test_all_that_it_said_is_json_with_the_request_and_its_tenant(operated):
    operated.keys.write_text(tenants(e=""))
    until(lambda: operated.reads_keys("e"), "the new tenant is known")
    operated.keys.write_text("[a]\n")
    assert operated.reads_keys("e") and operated.reads_keys("e")
    code, said = operated.server.stop()
    assert code == 0
    lines = [json.loads(line) for line in (operated.server.told + said).splitlines()]
    (begun,) = [line for line in lines if line["message"] == "starting"]
    assert begun["environment"] == "TIERCEL_STOER (meant: TIERCEL_STORE?)"
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (line,) = [line for line in lines if line.get("request_id") == "second"]
    assert (line["logger"], line["tenant"], line["method"], line["status"]) == (
        "tiercel.access",
        "a",
        "POST",
        200,
    )
    assert (line["path"], line["tokens_out"]) == ("/v1/completions", 5)
    assert line["tokens_in"] > line["tokens_cached"] > 0 and line["ms"] > 0
    assert any("stay as they were" in line["message"] and line["level"] == "error" for line in lines)
    assert not any("key-a" in line["message"] for line in lines), "no key is logged"
