"""Goal: what `deploy/` says of metrics, alerts and compositions is true of real servers. Method: promtool;
the command lines of compose.yaml as processes on this machine: two servers, SGLang's router, and a Prometheus
that evaluates every expression."""

import json
import re
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from tests.server.test_metrics import every_name
from tests.servers import free_port, prometheus, prometheus_program
from tests.test_documents import options
from tests.wait import until
from tests.whole.process import Server
from tests.whole.test_clients import installed, router_of
from tiercel.cli.commands import app

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
RULES = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {"$__rate_interval": "30s", "$instance": ".*"}
LESS = ("--device-memory", "16MiB", "--host-memory", "48MiB", "--sparse", "always")
"""Beside the options of the file: little memory, and sparse pages, which have metrics of their own."""
OTHERS = {"tiercel_stage_busy_seconds_total", "tiercel_accept_length"}
OTHERS |= {"tiercel_events_batches_total", "tiercel_events_dropped_total"}
OTHERS |= {"tiercel_tenant_tokens_total", "tiercel_tenant_refused_total"}
"""Metrics of what the composition does not use: stages, guesses, KV events, tenants."""


def expressions():
    """Of the dashboard, as Grafana sends them, and of the alerts: where, labels of the legend, expression."""
    for panel in PANELS:
        for target in panel["targets"]:
            text, legend = target["expr"], target["legendFormat"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            yield f"{panel['title']}: {legend}", re.findall(r"{{(\w+)}}", legend), text
    for rule in RULES:
        yield rule["alert"], None, rule["expr"]


def metrics_in(text):
    return set(re.findall(r"\b(?:tiercel|process)_\w+(?=[{\[])", text))


def exported(names):
    """With the names that a histogram has for its parts."""
    return {name + part for name in names for part in ("", "_bucket", "_sum", "_count")}


def tool(*words):
    done = subprocess.run(
        [prometheus_program("promtool"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_expression_names_metrics_that_exist():
    known = exported(every_name()) | {f"process_{n}" for n in ("start_time_seconds", "open_fds", "max_fds")}
    known |= {"process_cpu_seconds_total", "process_resident_memory_bytes"}
    for where, _, text in expressions():
        assert metrics_in(text) | set(re.findall(r"\bup\{", text)), where
        assert metrics_in(text) <= known, where
        assert not re.findall(r"\$", text), where


def test_alerts_are_valid_and_fire_when_they_should():
    tool("check", "config", str(DEPLOY / "prometheus.yml"))
    tool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))
    tested = (Path(__file__).with_name("alerts_test.yml")).read_text()
    for rule in RULES:
        assert rule["for"] and rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".") and rule["annotations"]["runbook"].endswith(".")
        assert f"alertname: {rule['alert']}\n" in tested, f"{rule['alert']} has no unit test"
    for option in re.findall(r"--[a-z][\w-]+", (DEPLOY / "alerts.yml").read_text()):
        assert option in options(), option


def test_the_dashboard_is_laid_out_without_gaps_in_what_grafana_needs():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        place = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not place & taken, panel["title"]
        taken |= place
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
    (file,) = [each for each in COMPOSE["services"]["grafana"]["volumes"] if "grafana.json" in each]
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yml").read_text())["providers"]
    assert file.split(":")[1].startswith(provider["options"]["path"])


def test_files_that_are_mounted_and_built_are_there():
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file(), volume
        if build := service.get("build"):
            assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    (pinned,) = re.findall(r"sglang-router==\S+", (DEPLOY / "router.Dockerfile").read_text())
    assert pinned in (DEPLOY.parent / "tests" / "clients.txt").read_text()


class Composed:
    """The services of compose.yaml as processes. Names of services become addresses on this machine."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        ports = {name: free_port() for name in ("server-1", "server-2")}
        self.places = {f"{name}:9000": f"127.0.0.1:{port}" for name, port in ports.items()}
        monkeypatch.setenv("TIERCEL_SHARE_KEY", "shared")
        monkeypatch.setenv("TIERCEL_MODEL", "tiny-v4")
        self.servers = [self._start(name, port) for name, port in ports.items()]
        self.places |= {
            f"{name}:8000": each.url.removeprefix("http://")
            for name, each in zip(ports, self.servers, strict=True)
        }

    def _start(self, name, port):
        own = {"0.0.0.0:9000": f"127.0.0.1:{port}", "/var/lib/tiercel": f"{self.folder}/{name}"}
        (self.folder / name).mkdir()
        return Server(*self.command(name, own), *LESS)

    def command(self, service, own=None):
        words = "\n".join(COMPOSE["services"][service]["command"])
        return self.moved(words, own).split("\n")

    def moved(self, text, own=None):
        for there, here in {**self.places, **(own or {})}.items():
            text = text.replace(there, here)
        return text

    def router(self):
        """Without where it listens: `router_of` chooses the ports."""
        words = [each for each in self.command("router") if not re.match("--(host|port|prometheus)", each)]
        return router_of(*words, servers=2)

    def prometheus(self):
        """With a shorter interval, and without the router's metrics."""
        config = self.moved((DEPLOY / "prometheus.yml").read_text()).replace("15s", "1s")
        config = re.sub(r"  - job_name: router\n.*", "", config, flags=re.DOTALL)
        (self.folder / "prometheus.yml").write_text(config)
        (self.folder / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text())
        own = [each for each in self.command("prometheus") if "retention" in each]
        return prometheus(self.folder / "prometheus.yml", *own)

    def close(self):
        for each in self.servers:
            code, rest = each.stop()
            assert code == 0 and "Traceback" not in rest, rest


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        own = Composed(tmp_path_factory.mktemp("composed"), monkeypatch)
        yield own
        own.close()


@pytest.mark.usefixtures(installed.__name__)
def test_the_composition_serves_and_prometheus_understands_it(composed):
    """One story, because its processes take seconds to start."""
    with (
        composed.router() as router,
        composed.prometheus() as watch,
        httpx.Client(base_url=watch.url) as client,
    ):
        load = ["--conversations", "6", "--turns", "2", "--prompt-tokens", "300", "--answer-tokens", "8"]
        done = CliRunner().invoke(app, ["bench", router, *load, "--json", "-", "--send", "text"])
        told = json.loads(done.output)
        assert (told["answered"], told["errors"]) == (12, {}) and told["hit_ratio"] > 0.2
        check_expressions(client, composed)
        check_alerts(client)


def value(client, text):
    answer = client.get("/api/v1/query", params={"query": text}).json()
    assert answer["status"] == "success", (text, answer)
    return answer["data"]["result"]


def check_expressions(client, composed):
    """All of them are understood; where there are such metrics, they have values with the labels of their
    legend."""
    asked = 'sum(tiercel_http_requests_total{job="tiercel",call="/v1/completions",status="200"}) == 12'
    until(lambda: value(client, asked), "Prometheus has seen all requests of both servers")
    until(
        lambda: len(value(client, "rate(tiercel_engine_steps_total[30s])")) == 2, "it has two values of each"
    )
    assert [each["value"][1] for each in value(client, 'up{job="tiercel"}')] == ["1", "1"]
    pages = [httpx.get(f"{each.url}/metrics").text for each in composed.servers]
    there = {name for page in pages for name in re.findall(r"^(\w+)", page, re.MULTILINE)}
    for where, labels, text in expressions():
        found = value(client, text)
        assert metrics_in(text) <= there | OTHERS, where
        if labels is not None and metrics_in(text) <= there and "> 0" not in text and "429" not in text:
            assert found and all(label in each["metric"] for label in labels for each in found), where


def check_alerts(client):
    def rules():
        return client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]

    until(lambda: all(each["health"] == "ok" for each in rules()), "every rule was evaluated")
    assert [each["name"] for each in rules()] == [each["alert"] for each in RULES]
    assert [each["name"] for each in rules() if each.get("lastError") or each["state"] == "firing"] == []
