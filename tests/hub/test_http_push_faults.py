# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while a model is pushed: success or one line, no commit that is incomplete, and a second attempt."""

import hashlib
import os
import re
import signal
import time

import pytest

from tests.hub_repositories import Repository


REPOSITORY = "user/model"


@pytest.fixture(scope="module")
def model(hub_and_client, tmp_path_factory):
    """The folder of a language model in two shards."""
    _, client = hub_and_client
    folder = tmp_path_factory.mktemp("push") / "model"
    client.check(f"""
        from tests import hub_models
        hub_models.make("language").save_pretrained("{folder}", max_shard_size="60KB")
    """)
    assert len(list(folder.glob("*.safetensors"))) == 2
    return folder


@pytest.fixture
def hub(hub, model):
    """Without the repository and its weights."""
    hub.repositories.pop(REPOSITORY, None)
    for path in model.glob("*.safetensors"):
        hub.objects.pop(hashlib.sha256(path.read_bytes()).hexdigest(), None)
    hub.requests.clear()
    return hub


def pushing(model) -> str:
    """A program that pushes, and prints how long the client waited between its attempts."""
    return f"""
        import mhla_hf.hub.push
        from mhla_hf.cli.main import app
        mhla_hf.hub.push._LARGE = 50_000
        try:
            app(["push", "{model}", "{REPOSITORY}", "--quiet"])
        finally:
            print(waits)
    """


def error_of(result) -> str:
    """The line of error of a program."""
    lines = [line for line in result.errors.splitlines() if line.startswith("error: ")]
    assert result.code == 1 and len(lines) == 1 and "Traceback" not in result.errors, result.errors
    return lines[0]


def is_complete(hub, model) -> bool:
    """True if the repository has all files. Fails if an incomplete commit was ever visible."""
    repository = hub.repositories.get(REPOSITORY, Repository())
    assert hub.unknown == []
    first, *commits = repository.commits.values()
    assert set(first) == {".gitattributes"} and len(commits) <= 1
    weights = {path.name: path.read_bytes() for path in model.glob("*.safetensors")}
    for files in commits:
        assert {"README.md", "config.json", "model.safetensors.index.json"} <= set(files)
        assert all(files[name].content == content for name, content in weights.items())
    return bool(commits)


UPLOADS = ("PUT", r"^/storage/")
COMMIT = ("POST", r"/commit/main$")
RETRY_AFTER = {"headers": {"Retry-After": "9"}}
NOT_AVAILABLE = r"the Hub is not available for .* \(error 50\d\): run this again later"
BROKEN = r"the connection to the Hub failed for .*: check the network and run this again"


@pytest.mark.parametrize(
    ("fault", "effect", "options", "waits"),
    [
        pytest.param(UPLOADS, 500, {}, "[1]", id="error of the storage"),
        pytest.param(UPLOADS, 429, RETRY_AFTER, "[10.0]", id="rate limit of the storage"),
        pytest.param(UPLOADS, "drop", {}, "[1]", id="connection lost in weights"),
        pytest.param(UPLOADS, "lose", {}, "[1]", id="answer of the storage lost"),
        pytest.param(("POST", r"/preupload/"), 502, {}, "[1]", id="error before the upload"),
        pytest.param(("POST", r"/objects/batch$"), 503, {"times": 2}, "[1, 2]", id="errors of the large file storage"),
        pytest.param(("POST", r"/verify$"), 504, {}, "[1]", id="error after the upload"),
    ],
)
def test_passing_faults(fault, effect, options, waits, hub, client, model):
    injected = hub.inject(*fault, effect, **options)
    result = client.run(pushing(model))
    assert injected.reached.is_set()
    assert (result.code, result.output.strip()) == (0, waits), result.errors
    assert is_complete(hub, model)


@pytest.mark.parametrize(
    ("fault", "effect", "options", "message"),
    [
        pytest.param(("POST", r"/repos/create$"), 500, {}, NOT_AVAILABLE, id="error while the repository is created"),
        pytest.param(UPLOADS, 503, {"times": None}, NOT_AVAILABLE, id="storage that is down"),
        pytest.param(UPLOADS, "drop", {"times": None}, BROKEN, id="connection lost again and again"),
        pytest.param(
            UPLOADS,
            "corrupt",
            {},
            r"refuses the request .* \(error 400\): .*does not match its SHA-256",
            id="wrong checksum",
        ),
        pytest.param(COMMIT, 503, {}, NOT_AVAILABLE, id="error of the commit"),
        pytest.param(COMMIT, 403, {}, r"may not write to .*: log in with `hf auth login`", id="no right to commit"),
        pytest.param(COMMIT, "drop", {}, BROKEN, id="connection lost in the commit"),
        pytest.param(
            ("POST", r""), 429, {"times": None, "headers": {"Retry-After": "9"}}, "wait 9 seconds", id="rate limit"
        ),
    ],
)
def test_lasting_faults(fault, effect, options, message, hub, client, model):
    injected = hub.inject(*fault, effect, **options)
    error = error_of(client.run(pushing(model)))
    assert re.search(message, error) and REPOSITORY in error, error
    assert injected.reached.is_set() and not is_complete(hub, model)
    hub.heal()
    sent = {oid: hub.uploaded(oid) for oid in hub.objects}
    assert client.run(pushing(model)).code == 0
    assert is_complete(hub, model)
    # What had arrived was not sent again.
    assert {oid: hub.uploaded(oid) for oid in sent} == sent


def test_commit_whose_answer_is_lost(hub, client, model):
    hub.inject(*COMMIT, "lose")
    assert re.search(BROKEN, error_of(client.run(pushing(model))))
    assert is_complete(hub, model)
    commits = list(hub.repositories[REPOSITORY].commits)
    assert client.run(pushing(model)).code == 0
    assert list(hub.repositories[REPOSITORY].commits) == commits


@pytest.mark.parametrize("part_size", [2**20, 20_000])
def test_killed_push_continues(part_size, hub, client, model, monkeypatch):
    """The process is killed while it sends the second of two files of weights."""
    monkeypatch.setattr(hub, "part_size", part_size)
    first, second = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in model.glob("*.safetensors"))
    stopped = hub.inject("PUT", f"^/storage/{second}", "hang")
    process = client.start(pushing(model))
    assert stopped.reached.wait(60)
    assert any(wait_for(lambda: first in hub.objects))
    os.kill(process, signal.SIGKILL)
    assert client.wait().code == -signal.SIGKILL
    assert not is_complete(hub, model)
    hub.heal()
    size = len(hub.objects[first])
    assert hub.uploaded(first) == size
    assert client.run(pushing(model)).code == 0
    assert is_complete(hub, model)
    assert (hub.uploaded(first), hub.uploaded(second)) == (size, len(hub.objects[second]))


def wait_for(condition):
    """Checks a condition until it holds, for ten seconds."""
    for _ in range(200):
        yield condition()
        time.sleep(0.05)
