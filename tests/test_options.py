"""Goal: a setting is an option, and reaches what it sets. Method: every option given, field by field."""

from dataclasses import MISSING, fields
from inspect import signature
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from tiercel.cli import options
from tiercel.cli.commands import app
from tiercel.cli.options import EXPERTS, GROUPS, MOST
from tiercel.cli.serve import serve
from tiercel.cli.verify import verify
from tiercel.config import CacheConfig
from tiercel.engine.config import Build, EngineConfig
from tiercel.errors import ConfigError
from tiercel.server.options import ServerOptions

KINDS = (ServerOptions, Build, EngineConfig, CacheConfig)


def settings_of(kind):
    return [each for each in fields(kind) if "help" in each.metadata]


def test_a_variable_that_no_option_reads_is_named(monkeypatch):
    told = list(options.unread_variables(serve))
    monkeypatch.setenv("TIERCEL_DEVICE_MEMROY", "1GiB")
    monkeypatch.setenv("TIERCEL_DEVICE_MEMORY", "1GiB")
    monkeypatch.setenv("TIERCEL_CONFIG", "file")
    assert {*options.unread_variables(serve)} - {*told} == {
        "TIERCEL_DEVICE_MEMROY (meant: TIERCEL_DEVICE_MEMORY?)"
    }


def taken_from(*arguments, **options_of):
    """What a command gets that is called so."""
    got = []

    @options.with_settings(*KINDS, **options_of)
    def command(model: options.Model = options.MODEL, settings: object = None) -> None:
        got.append((model, settings))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return got[0]


def test_without_options_everything_is_as_the_classes_say():
    model, settings = taken_from()
    assert model == options.MODEL
    assert options.made(ServerOptions, settings) == ServerOptions()
    assert options.made(CacheConfig, settings) == CacheConfig()
    assert options.made(Build, settings) == Build()
    assert options.made(EngineConfig, settings, cache=CacheConfig()) == EngineConfig(cache=CacheConfig())


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, each) for kind in KINDS for each in settings_of(kind)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_setting_is_an_option_that_reaches_its_field(kind, field):
    option = "--" + field.metadata.get("option", field.name).replace("_", "-")
    if "memory" in field.metadata:
        given, wanted = [option, "3MiB"], 3 * 1024**2
    elif field.default is True:
        given, wanted = ["--plain" if field.name == "overlap" else f"--no-{option[2:]}"], False
    elif field.default is False:
        given, wanted = [option], True
    elif field.name == "cors_origin":
        given, wanted = [option, "https://a", option, "*"], ("https://a", "*")
    elif isinstance(field.default, tuple):
        given, wanted = [option, "memory:", option, "file:///x"], ("memory:", "file:///x")
    elif field.name in ("tls_cert", "tls_key"):  # each needs the other
        given, wanted = ["--tls-cert", "file", "--tls-key", "file"], "file"
    elif field.name == "share_pages":
        given, wanted = [option, "localhost:7"], "localhost:7"
    elif field.name == "share_mooncake":
        given, wanted = [option, "rdma:mlx5_0"], "rdma:mlx5_0"
    elif isinstance(field.default, float):
        given, wanted = [option, "7.5"], 7.5
    elif isinstance(field.default, int) or "least" in field.metadata or field.name == "page_tokens":
        given, wanted = [option, "7"], 7
    else:
        wanted = field.metadata.get("one_of", ("other",))[0]
        given = [option, wanted]
    assert field.default is not MISSING
    _, settings = taken_from(*given)
    assert getattr(options.made(kind, settings), field.name) == wanted


def test_a_command_may_leave_settings_out_and_have_defaults_of_its_own():
    _, settings = taken_from(without=("store",), host_memory="2GiB")
    assert "store" not in settings and options.made(Build, settings).store is None
    assert options.made(CacheConfig, settings).host_bytes == 2 * 1024**3


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (CacheConfig, {"evict": "mru"}),
        (CacheConfig, {"layout": "sideways"}),
        (CacheConfig, {"tail_every_pages": 0}),
        (CacheConfig, {"tails_per_path": True}),
        (CacheConfig, {"fetch_deadline_s": 0}),
        (CacheConfig, {"store_timeout_s": "1"}),
        (CacheConfig, {"host_bytes": -1}),
        (EngineConfig, {"running_max": 0}),
        (EngineConfig, {"context_tokens": 0}),
        (Build, {"share": "everything"}),
        (Build, {"page_tokens": 0}),
        (Build, {"page_tokens": True}),
        (Build, {"exact": "yes"}),
        (Build, {"store": ""}),
        (Build, {"share_pages": "9000"}),
        (Build, {"share_pages": "0.0.0.0:9000"}),
        (Build, {"share_key": " "}),
        (Build, {"share_mooncake": "udp"}),
        (ServerOptions, {"port": 65536}),
        (ServerOptions, {"strict": "yes"}),
        (ServerOptions, {"access_log": 0}),
        (ServerOptions, {"host": ""}),
        (ServerOptions, {"keys_file": ""}),
        (ServerOptions, {"api_key": ("",)}),
        (ServerOptions, {"api_key": ("good", "")}),
        (ServerOptions, {"admin_key": ""}),
        (ServerOptions, {"connections_max": 0}),
        (ServerOptions, {"shutdown_s": 0.5}),
        (ServerOptions, {"api_key": "secret"}),
        (ServerOptions, {"store_allow": ("file:relative",)}),
        (ServerOptions, {"tls_cert": "alone.pem"}),
        (ServerOptions, {"tls_key": "alone.pem"}),
        (ServerOptions, {"cors_origin": ("app.example",)}),
        (ServerOptions, {"log_format": "xml"}),
        (ServerOptions, {"log_level": "loud"}),
    ],
)
def test_a_value_that_breaks_a_rule_is_named(kind, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kind(**wrong)


def test_a_size_that_is_none_is_named_as_the_user_wrote_it():
    _, settings = taken_from("--host-memory", "much")
    with pytest.raises(ConfigError, match="--host-memory"):
        options.made(CacheConfig, settings)


def test_an_option_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TIERCEL_API_KEY", "one two")
    monkeypatch.setenv("TIERCEL_ADMIN_KEY", "three")
    made = options.made(ServerOptions, taken_from()[1])
    assert (made.api_key, made.admin_key) == (("one", "two"), "three")


def test_every_option_of_serve_is_a_setting_and_every_setting_is_one():
    named = {each.metadata.get("option", each.name) for kind in KINDS for each in settings_of(kind)}
    assert set(signature(serve).parameters) == {"model", "named", "config"} | named


def test_verify_offers_only_what_has_an_effect_there():
    offered = set(signature(verify).parameters)
    assert offered.isdisjoint(
        {"store", "fetch", "fetch_deadline_s", "force_miss", "overlap", "waiting_max", "sparse"}
    )
    assert {"running_max", "replay", "evict", "host_memory"} <= offered


def test_the_help_has_groups_and_the_first_has_what_most_people_set():
    params = {each.name: each for each in serve_command().params if isinstance(each, typer.core.TyperOption)}
    groups = {}
    for name, each in params.items():
        groups.setdefault(each.rich_help_panel, []).append("model" if name == "named" else name)
    of_traffic = ["The traffic", "Rates and prices"]
    """Groups of `replay` and `plan`."""
    assert [*groups] == [*(title for title in GROUPS if title not in of_traffic), EXPERTS]
    for title in groups.keys() - {EXPERTS}:
        assert sorted(groups[title]) == sorted(GROUPS[title].split())
    assert len(groups[MOST]) == 10 and len(groups[EXPERTS]) <= 12


def test_the_help_names_a_default_and_a_variable_for_every_option():
    for each in serve_command().params:
        if isinstance(each, typer.core.TyperOption) and each.name not in ("help", "named"):
            assert each.envvar == f"TIERCEL_{each.name.upper()}" and each.show_envvar, each.name
            assert each.show_default, each.name
            assert each.default is not None or isinstance(each.show_default, str), each.name


def serve_command():
    group: Any = typer.main.get_command(app)
    return group.commands["serve"]
