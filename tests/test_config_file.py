"""Goal: one file says what the options say, and never what was not meant. Method: a command with the options
of `tiercel serve`, called with files, variables and options."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tiercel.cli import options
from tiercel.cli.config_file import ConfigFile, read_config
from tiercel.config import CacheConfig
from tiercel.engine.config import Build, EngineConfig
from tiercel.errors import ConfigError
from tiercel.server.options import ServerOptions


def called(*arguments):
    got = []

    @options.with_settings(ServerOptions, Build, EngineConfig, CacheConfig)
    def command(
        model: options.Model = options.MODEL,
        named: options.NamedModel = None,
        config: ConfigFile = None,
        settings: object = None,
    ) -> None:
        got.append((named or model, settings))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    return (result.output, None) if result.exit_code else got[0]


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "tiercel.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_gives_every_kind_of_option_with_dashes_or_underscores(file):
    path = file(
        'model = "folder"\nport = 9000\nhost-memory = "2GiB"\nshutdown_s = 3\nreplay = false\nstrict = true\n'
        'peer = ["peer://a:1", "peer://b:2"]\nserved-model-name = "one"\noverlap = false\n'
    )
    model, settings = called("--config", path)
    server = options.made(ServerOptions, settings)
    assert (model, server.port, server.shutdown_s, server.strict) == ("folder", 9000, 3, True)
    assert server.model_names == ("one",)
    assert options.made(Build, settings).peer == ("peer://a:1", "peer://b:2")
    engine = options.made(EngineConfig, settings, cache=options.made(CacheConfig, settings))
    assert (engine.cache.host_bytes, engine.replay, engine.overlap) == (2 << 30, False, False)


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(file, monkeypatch):
    monkeypatch.setenv("TIERCEL_PORT", "2")
    monkeypatch.setenv("TIERCEL_SHUTDOWN_S", "2")
    path = file('model = "file"\nport = 3\nshutdown-s = 3\nconnections-max = 3\n')
    model, settings = called("given", "--port", "1", "--config", path)
    assert [settings[name] for name in ("port", "shutdown_s", "connections_max")] == [1, 2, 3]
    assert model == "given"


def test_the_file_itself_may_be_named_by_the_environment(file, monkeypatch):
    monkeypatch.setenv("TIERCEL_CONFIG", str(file("port = 4")))
    assert called()[1]["port"] == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "prot is not an option; the nearest is port"),
        ('served-model-names = "x"', "the nearest is served-model-name"),
        ("qqq = 1", "qqq is not an option$"),
        ('config = "other"', "config is not an option"),
        ("[server]\nport = 1", "server is not an option"),
        ("[port]\nx = 1", "port is a table"),
        ("port = [1]", "port is a list"),
        ("host-memory = 1\nhost_memory = 2", "twice"),
        ("port = ", "is not TOML"),
    ],
)
def test_what_can_not_be_meant_is_an_error_that_names_it(file, text, says):
    with pytest.raises(ConfigError, match=says):
        called("--config", file(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('port = "9000"', "port = '9000', but it must be a whole number"),
        ("port = 1.0", "port = 1.0, but it must be a whole number"),
        ("port = true", "port = True, but it must be a whole number"),
        ('strict = "yes"', "strict = 'yes', but it must be true or false"),
        ("strict = 1", "strict = 1, but it must be true or false"),
        ('overlap = "plain"', "overlap = 'plain', but it must be true or false"),
        ('store-timeout-s = "1"', "store-timeout-s = '1', but it must be a number"),
        ("host = 1", "host = 1, but it must be a text in quotes"),
        ("api-key = 100", "api-key = 100, but it must be a text in quotes"),
        ('api-key = ["a", 1]', "api-key = 1, but it must be a text in quotes"),
        ("host-memory = 1.5", "host-memory = 1.5, but it must be a size"),
        ("evict = 2026-11-17", "evict = .*, but it must be a text in quotes"),
    ],
)
def test_types_are_those_of_toml(file, text, says):
    with pytest.raises(ConfigError, match=says):
        called("--config", file(text))


def test_a_whole_number_may_be_a_size_or_seconds(file):
    _, settings = called("--config", file("host-memory = 4096\nstore-timeout-s = 2"))
    made = options.made(CacheConfig, settings)
    assert (made.host_bytes, made.store_timeout_s) == (4096, 2)


@pytest.mark.parametrize(
    ("option", "blank"),
    [(name, "") for name in ("api_key", "admin_key", "share_key", "keys_file", "config", "port", "strict")]
    + [(name, "  ") for name in ("api_key", "admin_key", "share_key", "host_memory")],
)
def test_an_empty_variable_is_an_error_as_an_empty_key_is(monkeypatch, option, blank):
    name = options.env_name(option)
    monkeypatch.setenv(name, blank)
    with pytest.raises(ConfigError, match=f"^{name} = .*must not be empty"):
        called()


@pytest.mark.parametrize("option", ["api_key", "admin_key", "share_key", "keys_file", "store", "host"])
def test_an_empty_text_is_an_error_in_a_file_and_on_the_command_line(file, option):
    dashed = option.replace("_", "-")
    for given in (("--config", file(f'{dashed} = ""')), (f"--{dashed}", "")):
        _, settings = called(*given)
        with pytest.raises(ConfigError, match=f"^{option} = .*must not be empty"):
            for kind in (ServerOptions, Build):
                options.made(kind, settings)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing.toml.*can not be read"):
        read_config(tmp_path / "nothing.toml", {})


@pytest.mark.parametrize(
    ("variable", "kind", "field"),
    [
        ("TIERCEL_API_KEY", ServerOptions, "api_key"),
        ("TIERCEL_ADMIN_KEY", ServerOptions, "admin_key"),
        ("TIERCEL_SHARE_KEY", Build, "share_key"),
        ("TIERCEL_STORE", Build, "store"),
    ],
)
def test_secrets_come_from_the_environment(monkeypatch, variable, kind, field):
    monkeypatch.setenv(variable, "redis://:secret@host")
    made = getattr(options.made(kind, called()[1]), field)
    assert made in ("redis://:secret@host", ("redis://:secret@host",))
