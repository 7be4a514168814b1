"""Goal: who has no key gets nothing, and learns nothing. Method: every call, with and without."""

import pytest

from tests.server.scripted import ScriptedService, call, talking
from tiercel.server.app import create_app
from tiercel.server.options import ServerOptions

USERS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/generate"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/scripted"),
    ("GET", "/get_server_info"),
    ("GET", "/server_info"),
    ("GET", "/get_model_info"),
    ("GET", "/v1/cache/stats"),
    ("GET", "/v1/cache/explain/x"),
]
PUBLIC = ["/health", "/ready", "/metrics", "/openapi.json"]
WRONG = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer wrong"},
    {"authorization": "Basic secret"},
    {"authorization": "secret"},
    {"authorization": b"Bearer \xff"},
]


def flush(options, headers=None, service=None):
    return call("POST", "/flush_cache", service, options, headers=headers)


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_without_the_users_key_every_call_for_users_is_401_before_its_body_is_looked_at(headers):
    with talking(ScriptedService(), ServerOptions(api_key="secret")) as talk:
        for method, path in USERS:
            response = talk(method, path, headers=headers, content=b"{")
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"


def test_with_the_users_key_they_are_answered():
    options = ServerOptions(api_key="secrét")
    headers = {"authorization": "bearer secrét".encode()}
    assert call("GET", "/v1/models", options=options, headers=headers).status_code == 200


@pytest.mark.parametrize("path", PUBLIC)
def test_probes_need_no_key(path):
    assert call("GET", path, options=ServerOptions(api_key="secret")).status_code == 200


def test_without_an_admin_key_only_this_machine_may_flush():
    service = ScriptedService()
    refused = flush(ServerOptions(api_key="user"), {"authorization": "Bearer user"}, service)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_not_configured"
    assert service.events == []
    assert flush(ServerOptions(loopback=True)).status_code == 200


@pytest.mark.parametrize("loopback", [True, False])
def test_an_admin_key_is_asked_of_everyone(loopback):
    service = ScriptedService()
    options = ServerOptions(api_key="user", admin_key="admin", loopback=loopback)
    with talking(service, options) as talk:
        for headers in (*WRONG, {"authorization": "Bearer user"}):
            assert talk("POST", "/flush_cache", headers=headers).status_code == 401
        assert service.events == []
        assert talk("POST", "/flush_cache", headers={"authorization": "Bearer admin"}).status_code == 200
    assert service.events == ["flush 0.0"]


def test_the_schema_says_which_calls_need_which_key():
    options = ServerOptions(api_key="user", admin_key="admin")
    paths = create_app(ScriptedService(), options).openapi()["paths"]
    assert paths["/v1/models"]["get"]["security"] == [{"API key": []}]
    assert paths["/flush_cache"]["post"]["security"] == [{"admin key": []}]
    assert "security" not in paths["/health"]["get"]
