"""Goal: who has no key gets nothing, and learns nothing. Method: every call, with and without."""

import re

import pytest

from tests.server.scripted import ScriptedService, call, talking
from tiercel.server.app import create_app
from tiercel.server.options import ServerOptions

KEYS = ServerOptions(api_key=("user",), admin_key="admin")
PATHS = create_app(ScriptedService(), KEYS).openapi()["paths"]


def calls_with(*keys):
    """Every call that needs one of these keys: its method and path."""
    wanted = [{key: []} for key in keys]
    every = ((path, method, call) for path, each in PATHS.items() for method, call in each.items())
    found = [(path, method.upper()) for path, method, call in every if call.get("security", []) == wanted]
    return [(method, re.sub(r"{.*?}", "x", path)) for path, method in found]


USERS = calls_with("API key")
PUBLIC = ["/health", "/ready", "/metrics", "/openapi.json"]
WRONG = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer wrong"},
    {"authorization": "Basic secret"},
    {"authorization": "secret"},
    {"authorization": b"Bearer \xff"},
    {"x-api-key": "wrong"},
]


def flush(options, headers=None, service=None):
    return call("POST", "/flush_cache", service, options, headers=headers)


def test_every_call_says_who_may_make_it():
    anybody = {path for _, path in calls_with()} - {*PUBLIC}
    assert not anybody, f"{anybody}: give keys.user or keys.admin as dependencies, or add it to PUBLIC here"
    assert len(USERS) > 18 and len(ADMIN) > 4


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_without_the_users_key_every_call_for_users_is_401_before_its_body_is_looked_at(headers):
    with talking(ScriptedService(), ServerOptions(api_key=("secret",))) as talk:
        for method, path in USERS:
            response = talk(method, path, headers=headers, content=b"{")
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"


def test_with_the_users_key_they_are_answered():
    options = ServerOptions(api_key=("secrét",))
    headers = {"authorization": "bearer secrét".encode()}
    assert call("GET", "/v1/models", options=options, headers=headers).status_code == 200


@pytest.mark.parametrize("path", PUBLIC)
def test_probes_need_no_key(path):
    assert call("GET", path, options=ServerOptions(api_key=("secret",))).status_code == 200


ADMIN = calls_with("admin key")
"""Calls that act on the server itself, or tell where its store is."""


def test_without_any_key_only_this_machine_may_flush():
    service = ScriptedService()
    refused = flush(ServerOptions(), service=service)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_not_configured"
    assert service.events == []
    assert flush(ServerOptions(loopback=True)).status_code == 200


@pytest.mark.parametrize("loopback", [True, False])
def test_without_an_admin_key_the_users_key_guards_admin_calls(loopback):
    service = ScriptedService()
    with talking(service, ServerOptions(api_key=("user",), loopback=loopback)) as talk:
        for method, path in ADMIN:
            for headers in WRONG:
                assert talk(method, path, headers=headers).status_code == 401, path
        assert service.events == []
        assert talk("POST", "/flush_cache", headers={"authorization": "Bearer user"}).status_code == 200
    assert service.events == ["flush 0.0"]


@pytest.mark.parametrize("keys", [{}, {"api_key": ("user",)}, {"admin_key": "user"}], ids=str)
@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:9", "null", "http://[", ""])
def test_a_page_from_elsewhere_can_not_make_admin_calls(origin, keys):
    service = ScriptedService()
    with talking(service, ServerOptions(loopback=True, **keys)) as talk:
        for method, path in ADMIN:
            response = talk(method, path, headers={"authorization": "Bearer user", "origin": origin})
            assert response.status_code == 403, path
            assert response.json()["error"]["code"] == "foreign_origin"
        own = {"authorization": "Bearer user", "origin": "http://localhost"}
        assert service.events == []
        assert talk("POST", "/flush_cache", headers=own).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", ""]
)
def test_a_name_that_was_bound_to_this_machine_can_not_make_admin_calls_without_a_key(host):
    service = ScriptedService()
    with talking(service) as talk:
        for method, path in ADMIN:
            for more in ({}, {"origin": f"http://{host}"}):
                response = talk(method, path, headers={"host": host, **more})
                assert response.status_code == 403, path
                assert response.json()["error"]["code"] in ("foreign_host", "foreign_origin")
    assert service.events == []


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.8.8", "[::1]:8000"])
def test_every_name_of_this_machine_may(host):
    assert flush(ServerOptions(loopback=True), {"host": host}).status_code == 200


@pytest.mark.parametrize("header", ["forwarded", "x-forwarded-for", "via"])
def test_who_comes_through_a_proxy_is_not_this_machine(header):
    refused = flush(ServerOptions(loopback=True), {header: "1.1 somewhere"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_host")


def test_a_server_has_as_many_keys_as_it_has_users():
    with talking(ScriptedService(), ServerOptions(api_key=("one", "two"))) as talk:
        for key, status in (("one", 200), ("two", 200), ("three", 401)):
            assert talk("GET", "/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status


@pytest.mark.parametrize("loopback", [True, False])
def test_an_admin_key_is_asked_of_everyone(loopback):
    service = ScriptedService()
    options = ServerOptions(api_key=("user",), admin_key="admin", loopback=loopback)
    with talking(service, options) as talk:
        for headers in (*WRONG, {"authorization": "Bearer user"}):
            assert talk("POST", "/flush_cache", headers=headers).status_code == 401
        assert service.events == []
        assert talk("POST", "/flush_cache", headers={"authorization": "Bearer admin"}).status_code == 200
    assert service.events == ["flush 0.0"]


def test_the_schema_says_which_calls_need_which_key():
    options = ServerOptions(api_key=("user",), admin_key="admin")
    paths = create_app(ScriptedService(), options).openapi()["paths"]
    assert paths["/v1/models"]["get"]["security"] == [{"API key": []}]
    assert paths["/flush_cache"]["post"]["security"] == [{"admin key": []}]
    assert "security" not in paths["/health"]["get"]
