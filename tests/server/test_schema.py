"""Goal: the OpenAPI schema is true. Method: schemathesis makes requests from it, good and bad."""

import os
import re
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.scripted import ScriptedService
from tiercel.server.app import create_app
from tiercel.server.options import ServerOptions

SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json", create_app(ScriptedService(), ServerOptions(loopback=True))
)
BEYOND_A_SCHEMA = (
    "context_length_exceeded",
    "conflicting_values",
    "invalid_grammar",
    "invalid_store",
    "item_not_found",
    "not_a_token",
    "not_an_address",
    "no_such_peer",
    "no_tools",
    "previous_response_not_found",
)
"""Why a request may be refused that is right field by field."""

TRANSLATED = "^/(tokenize|v1/(messages|responses))"
"""Calls that end as a chat, or as a part of one: a few examples are enough, and they take long to make."""

EXAMPLES = int(os.environ.get("TIERCEL_EXAMPLES", "8"))
"""Of each call, good and bad; `make soak` has more."""

always = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def test_every_call_is_in_the_table_of_calls():
    """Whatever its parameters are called, and with or without `/v1`."""
    table = (Path(__file__).parents[2] / "docs" / "calls.md").read_text()
    told = {re.sub(r"{.*?}", "{}", path) for path in re.findall(r"(?<=[` ])/[^`\s]+(?=`)", table)}
    paths = {re.sub(r"{.*?}", "{}", path) for path in SCHEMA.raw_schema["paths"]}
    missing = {path for path in paths if not {path, path.removeprefix("/v1")} & told}
    assert not missing, f"add {missing} to the table of docs/calls.md, and who makes it"


def is_excused(response) -> bool:
    if response.status_code not in (400, 404):
        return False
    return response.json()["error"]["code"] in BEYOND_A_SCHEMA


@SCHEMA.exclude(path_regex=TRANSLATED).parametrize()
@settings(max_examples=EXAMPLES, **always)
def test_every_call_does_what_the_schema_says(case):
    response = case.call()
    checks = [positive_data_acceptance] if is_excused(response) else []
    case.validate_response(response, excluded_checks=checks)


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
def test_so_does_every_call_that_is_translated(path, mode):
    @given(case=SCHEMA[path]["POST"].as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, **always)
    def ask(case):
        response = case.call()
        checks = [positive_data_acceptance] if is_excused(response) else []
        case.validate_response(response, excluded_checks=checks)

    ask()
