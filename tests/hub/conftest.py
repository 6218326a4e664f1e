# SPDX-License-Identifier: Apache-2.0
"""A Hub on the loopback interface, and a process that runs programs against it."""

from __future__ import annotations

import pytest

from tests.hub_client import HubClient
from tests.hub_server import HubServer


@pytest.fixture(scope="session")
def hub_and_client(tmp_path_factory):
    with HubServer() as hub, HubClient(hub, tmp_path_factory.mktemp("hub")) as client:
        yield hub, client


@pytest.fixture
def hub(hub_and_client):
    """The Hub without faults; repositories of earlier tests are still there."""
    hub, client = hub_and_client
    yield hub
    hub.heal()
    client.stop()
    client.clear_cache()


@pytest.fixture
def client(hub, hub_and_client):
    return hub_and_client[1]
