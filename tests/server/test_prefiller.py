"""Goal: a server learns from a router's request who computes the prompt, and talks to nobody else. Method:
requests as routers send them (tests/whole/test_clients.py starts one), and requests that say too much."""

import pytest

from tests.server.recorded import CHAT, COMPLETIONS, GENERATE, PD, USER
from tests.server.scripted import ScriptedService, call
from tiercel.asks.ask import Prefiller
from tiercel.errors import ConfigError
from tiercel.server.options import ServerOptions

GOOD = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "Hello"}, GENERATE: {"text": "Hello"}}
PEERS = ServerOptions(
    loopback=True,
    strict=True,
    prefillers=("10.0.0.1:9001", "10.0.0.2:9001", "10.0.0.2:9002", "[fd00::1]:9001"),
    pages_address="10.0.0.9:9009",
)
ROOM = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9001, "bootstrap_room": 2**63 - 1}
NIXL = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 9001}
MOONCAKE = {
    "do_remote_prefill": True,
    "remote_bootstrap_addr": "http://10.0.0.1:9001",
    "transfer_id": "xfer-7",
}


def prefillers(path, options=PEERS, *, headers=None, **body) -> list[Prefiller | None]:
    """Of each ask of a request."""
    service = ScriptedService()
    answer = call("POST", path, service, options, json=GOOD[path] | body, headers=headers)
    assert answer.status_code == 200, answer.text
    return [ask.prefiller for ask in service.asks]


def refused(path, options=PEERS, **body) -> tuple[str, str]:
    service = ScriptedService()
    answer = call("POST", path, service, options, json=GOOD[path] | body)
    assert (answer.status_code, service.asks) == (400, [])
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


@pytest.mark.parametrize("path", GOOD)
def test_a_request_of_nobodys_router_names_nobody(path):
    assert prefillers(path) == [None]


# --- SGLang ---


@pytest.mark.parametrize("path", GOOD)
def test_sglangs_router_names_address_and_room(path):
    assert prefillers(path, **ROOM) == [Prefiller("10.0.0.1", 9001, str(2**63 - 1))]


@pytest.mark.parametrize("name", PD)
def test_what_sglangs_router_really_sends_is_understood(name):
    path, body = PD[name]
    options = ServerOptions(loopback=True, strict=True, prefillers=("127.0.0.1:9001",))
    asked = prefillers(path, options, **body)
    rooms = body["bootstrap_room"]
    expected = [
        Prefiller("127.0.0.1", 9001, str(room)) for room in (rooms if isinstance(rooms, list) else [rooms])
    ]
    if path == CHAT and len(expected) == 2:  # two answers to one prompt
        expected[1] = expected[0]
    assert asked == expected


def test_the_server_that_computes_the_prompt_is_named_to_itself():
    own = ROOM | {"bootstrap_host": "10.0.0.9", "bootstrap_port": 9009}
    assert prefillers(GENERATE, **own) == [Prefiller("10.0.0.9", 9009, str(2**63 - 1))]


def test_a_router_that_was_told_no_port_means_the_peer_on_that_host():
    assert prefillers(CHAT, **ROOM | {"bootstrap_port": None})[0].port == 9001
    assert (
        prefillers(CHAT, **ROOM | {"bootstrap_host": "[fd00::1]", "bootstrap_port": None})[0].host
        == "fd00::1"
    )
    param, message = refused(CHAT, **ROOM | {"bootstrap_host": "10.0.0.2", "bootstrap_port": None})
    assert (param, "a port is needed" in message) == ("bootstrap_host", True)


def test_prompts_of_a_batch_have_rooms_of_their_own():
    assert [
        each.room for each in prefillers(COMPLETIONS, prompt=["a", "b"], **ROOM | {"bootstrap_room": 7})
    ] == ["7", "8"]
    mixed = {
        "bootstrap_host": ["10.0.0.1", None],
        "bootstrap_port": [9001, None],
        "bootstrap_room": [7, None],
    }
    assert prefillers(COMPLETIONS, prompt=["a", "b"], **mixed) == [Prefiller("10.0.0.1", 9001, "7"), None]
    assert refused(COMPLETIONS, prompt=["a", "b", "c"], **mixed)[0] == "bootstrap_host"


@pytest.mark.parametrize("path", GOOD)
def test_without_peers_a_room_is_refused_by_name(path):
    param, message = refused(path, ServerOptions(loopback=True), **ROOM)
    assert (param, message) == (
        "bootstrap_host",
        "bootstrap_host = '10.0.0.1': this server was started without peers",
    )


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"bootstrap_host": "10.0.0.3"}, "bootstrap_host"),
        ({"bootstrap_port": 9002}, "bootstrap_host"),
        ({"bootstrap_host": "10.0.0.1:9001"}, "bootstrap_host"),
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_room": None}, "bootstrap_room"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_room": 2**63}, "bootstrap_room"),
        ({"bootstrap_port": 0}, "bootstrap_port"),
        ({"bootstrap_room": [1, 2]}, "bootstrap_room"),
    ],
    ids=str,
)
def test_only_peers_that_the_server_was_started_with_may_be_named(wrong, param):
    assert refused(GENERATE, **ROOM | wrong)[0] == param


# --- vLLM ---


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False, "do_remote_decode": False}])
def test_transfer_params_that_ask_for_nothing_change_nothing(path, params):
    assert prefillers(path, ServerOptions(loopback=True), kv_transfer_params=params) == [None]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("params", "room"),
    [
        (
            NIXL | {"remote_request_id": "cmpl-1", "remote_block_ids": [[1, 2]], "remote_engine_id": "e"},
            "cmpl-1",
        ),
        (NIXL, "both"),
        (MOONCAKE | {"do_remote_decode": False, "remote_engine_id": "e"}, "xfer-7"),
    ],
    ids=str,
)
def test_vllms_proxies_name_the_server_that_has_computed_the_prompt(path, params, room):
    """Without a name in it, the proxy's id of the request is the one name that both servers know."""
    asked = prefillers(path, kv_transfer_params=params, headers={"x-request-id": "both"})
    assert asked == [Prefiller("10.0.0.1", 9001, room)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("more", "room"), [({}, "both"), ({"transfer_id": "xfer-7"}, "xfer-7")])
def test_what_the_first_server_answers_is_what_the_second_is_asked(path, more, room):
    """As vLLM's proxy does: the answer's parameters go into the next request as they are."""
    first = ScriptedService()
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    asked = {"do_remote_decode": True, "do_remote_prefill": False} | nulls | more
    body = GOOD[path] | {"kv_transfer_params": asked, "max_tokens": 1}
    answer = call("POST", path, first, PEERS, json=body, headers={"x-request-id": "both"}).json()
    there = Prefiller("10.0.0.9", 9009, room)
    assert first.ask.prefiller == there
    other = ServerOptions(loopback=True, strict=True, prefillers=("10.0.0.9:9009",))
    assert prefillers(path, other, kv_transfer_params=answer["kv_transfer_params"]) == [there]


@pytest.mark.parametrize(
    ("params", "param", "why"),
    [
        (NIXL | {"remote_host": "10.0.0.3"}, "remote_host", "is not a peer"),
        (NIXL | {"remote_host": None}, "remote_host", "is needed"),
        (NIXL | {"do_remote_decode": True}, "do_remote_decode", "not together"),
        (NIXL | {"remote_port": "9001"}, "remote_port", "valid integer"),
        (
            MOONCAKE | {"remote_bootstrap_addr": "10.0.0.1"},
            "remote_bootstrap_addr",
            "must be http://host:port",
        ),
        (NIXL | {"mood": 1}, "mood", "is not a field"),
    ],
    ids=str,
)
def test_transfer_params_that_can_not_be_used_are_refused_by_name(params, param, why):
    named, message = refused(CHAT, kv_transfer_params=params)
    assert named == f"kv_transfer_params.{param}"
    assert why in message


def test_without_peers_transfer_params_are_refused_by_name():
    alone = ServerOptions(loopback=True)
    assert "started without peers" in refused(CHAT, alone, kv_transfer_params=NIXL)[1]
    assert (
        "does not share its pages" in refused(CHAT, alone, kv_transfer_params={"do_remote_decode": True})[1]
    )


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:65536", "host:x", "[]:1"])
def test_an_address_that_is_none_is_found_at_the_start(address):
    with pytest.raises(ConfigError, match="host:port"):
        ServerOptions(prefillers=(address,))
    with pytest.raises(ConfigError, match="host:port"):
        ServerOptions(pages_address=address)
