"""Goal: a real server keeps what its OpenAPI schema promises, and survives what it is sent. Method:
schemathesis against a process with so small a device that no answer is long."""

import re

import httpx
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.test_schema import EXAMPLES, TRANSLATED, always, is_excused
from tests.whole.process import running


@pytest.fixture(scope="module")
def server():
    with running("--device-memory", "1144KiB", "--host-memory", "8MiB") as own:
        yield own


CALLS = 28
"""What is served; a new call must be added here, so that none is forgotten by a change of the schema."""


@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value
)
def test_every_call_of_a_real_server_does_what_the_schema_says(server, mode):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == CALLS
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=1 if re.match(TRANSLATED, operation.path) else EXAMPLES // 4, **always)
        def ask(case):
            response = case.call(timeout=120)
            checks = [positive_data_acceptance] if is_excused(response) else []
            case.validate_response(response, excluded_checks=checks)

        try:
            ask()
        except Unsatisfiable:  # a call that takes nothing can be given nothing wrong
            assert mode is GenerationMode.NEGATIVE


def test_afterwards_it_is_well_and_holds_nothing(server):
    httpx.post(f"{server.url}/flush_cache?timeout=60", timeout=90).raise_for_status()
    stats = httpx.get(f"{server.url}/v1/cache/stats").json()
    assert all(pool["free"] == pool["capacity"] for pool in stats["pools"].values())
    assert not any(stats["queue"].values()), stats["queue"]
