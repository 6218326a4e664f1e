# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on the way to the Hub and back: one clear line or success, nothing half-visible, and a way on."""

import os
import re
import signal

import pytest


@pytest.fixture(scope="module")
def pushed(hub_and_client, tmp_path_factory):
    """The folder with the transformer's weights of `user/mhla`; `user/softmax` is a pipeline to convert."""
    hub, client = hub_and_client
    folder = tmp_path_factory.mktemp("pushed")
    client.check(f"""
        from safetensors.torch import save_file
        from tests import hub_models, tiny
        model = hub_models.make("wan")
        save_file(model.transformer.state_dict(), "{folder}/weights.safetensors")
        model.push_to_hub("user/mhla")
        tiny.wan_pipeline().push_to_hub("user/softmax")
        hub_models.make("language").push_to_hub("user/language")
    """)
    assert hub.unknown == []
    return folder


def load(client, folder, **variables):
    """Loads the pipeline, and prints the error or the client's waits."""
    program = f"""
        import mhla_hf, torch
        from safetensors.torch import load_file
        try:
            pipeline = mhla_hf.load_pipeline("user/mhla")
        except OSError as error:
            print(type(error).__name__, " ".join(str(error).split()))
        else:
            state = load_file("{folder}/weights.safetensors")
            assert all(torch.equal(value, state[name]) for name, value in pipeline.transformer.state_dict().items())
            print("loaded", waits)
    """
    return client.check(program, **variables).strip()


def convert(client, destination, *options, source="user/softmax", **variables):
    """Runs `mhla-hf convert` and returns its line of error; empty if it worked."""
    arguments = ("--blocks", "1,1,2", "--grid", "2,1,2", "--quiet", *options)
    result = client.command("convert", source, destination, *arguments, **variables)
    lines = [line for line in result.errors.splitlines() if line.startswith("error: ")]
    assert result.code == len(lines) <= 1 and "Traceback" not in result.errors, result.errors
    assert destination.exists() == (result.code == 0)
    return lines[0] if lines else ""


WEIGHTS = r"^/storage/"
DESCRIPTION = r"^/api/models/user/"


@pytest.mark.parametrize(
    ("methods", "path", "effect", "options", "waits"),
    [
        pytest.param("HEAD", r"/resolve/", 503, {}, "[]", id="error of a file's description"),
        pytest.param("HEAD", r"/resolve/", 503, {"times": 3}, "[1, 2]", id="several errors of a file's description"),
        pytest.param("GET", WEIGHTS, "drop", {"times": 2}, "[1, 1]", id="connection lost in weights"),
        pytest.param("GET", WEIGHTS, "hang", {}, "[1]", id="weights that do not come"),
        pytest.param("GET", WEIGHTS, 429, {"headers": {"Retry-After": "7"}}, "[8.0]", id="rate limit"),
    ],
)
def test_passing_faults_of_downloads(methods, path, effect, options, waits, hub, client, pushed):
    fault = hub.inject(methods, path, effect, **options)
    assert load(client, pushed) == f"loaded {waits}"
    assert fault.reached.is_set() and fault.times == 0


NAME = r"user/\w+"
LOG_IN = "log in with `hf auth login`"
GATED = rf"access to {NAME} is restricted: accept its conditions at http://\S+/{NAME}, and {LOG_IN}"
NOT_THERE = rf"{NAME} is not on the Hub, or is private: check the name, or {LOG_IN}"
NOT_AVAILABLE = rf"the Hub is not available for {NAME} \(error 50\d\): run this again later"
BROKEN = rf"the connection to the Hub failed for {NAME} \(.+\): check the network and run this again"
DAMAGED = rf"of {NAME} arrived damaged: the checksum is not the Hub's"


@pytest.mark.parametrize(
    ("methods", "path", "effect", "options", "message"),
    [
        pytest.param("GET", DESCRIPTION, 500, {}, NOT_AVAILABLE, id="error of the repository's description"),
        pytest.param("GET HEAD", r"/resolve/", 502, {}, NOT_AVAILABLE, id="error of files"),
        pytest.param("GET", WEIGHTS, 503, {}, NOT_AVAILABLE, id="error of the storage"),
        pytest.param("GET", WEIGHTS, 504, {"times": 1}, NOT_AVAILABLE, id="one error of the storage"),
        pytest.param("GET", WEIGHTS, "drop", {}, BROKEN, id="connection lost in weights"),
        pytest.param("GET", DESCRIPTION, "lose", {}, BROKEN, id="connection lost before an answer"),
        pytest.param("GET", WEIGHTS, "corrupt", {"times": 1}, rf"/\w+\.safetensors {DAMAGED}", id="damaged weights"),
        pytest.param("GET", "/config.json", "corrupt", {"times": 1}, rf"/config.json {DAMAGED}", id="damaged config"),
        pytest.param("GET HEAD", "", 401, {"code": "RepoNotFound"}, NOT_THERE, id="nobody is logged in"),
        pytest.param("GET HEAD", "/resolve/", 403, {"code": "GatedRepo"}, GATED, id="gated"),
        pytest.param("GET HEAD", "", 403, {}, rf"may not read {NAME} \(.+\): {LOG_IN}", id="forbidden"),
        pytest.param("GET HEAD", "", 404, {"code": "RepoNotFound"}, NOT_THERE, id="no such repository"),
        pytest.param("GET HEAD", "", 429, {"headers": {"Retry-After": "30"}}, "wait 30 seconds", id="rate limit"),
    ],
)
def test_lasting_faults_of_downloads(methods, path, effect, options, message, hub, client, pushed, tmp_path):
    options = {"times": None, **options}
    hub.inject(methods, path, effect, **options)
    error = load(client, pushed)
    assert re.match(f"HubError (source )?.*{message}", error), error
    hub.heal()
    assert load(client, pushed).startswith("loaded"), "the second attempt fails"
    client.clear_cache()
    hub.inject(methods, path, effect, **options)
    error = convert(client, tmp_path / "converted")
    assert re.search(f"user/softmax.*{message}", error), error
    hub.heal()
    assert convert(client, tmp_path / "converted") == "", "the second attempt fails"


@pytest.fixture
def closed(hub, pushed):
    """Makes `user/mhla` private or gated."""
    repository = hub.repositories["user/mhla"]
    yield lambda name: setattr(repository, name, True)
    repository.private = repository.gated = False


@pytest.mark.parametrize(
    ("kind", "token", "message"),
    [
        ("private", "", NOT_THERE),
        ("private", "reader", NOT_THERE),
        ("private", "wrong", f"the Hub does not accept the access token: {LOG_IN} again, or correct HF_TOKEN"),
        ("private", "loopback", None),
        ("gated", "", GATED),
        ("gated", "reader", GATED),
        ("gated", "loopback", None),
    ],
)
def test_repositories_that_not_everybody_may_read(kind, token, message, closed, client, pushed, tmp_path):
    closed(kind)
    answer = load(client, pushed, HF_TOKEN=token)
    if message is None:
        assert answer.startswith("loaded")
        return
    assert re.match(f"HubError .*{message}", answer), answer
    error = convert(client, tmp_path / "converted", source="user/mhla", HF_TOKEN=token)
    assert re.search(message, error), error


def test_mistakes_in_names(client, pushed, tmp_path):
    error = convert(client, tmp_path / "converted", "--revision", "v9")
    assert "user/softmax has no such revision: check the name of the branch, tag or commit" in error
    error = convert(client, tmp_path / "converted", source="user/sofmtax")
    assert re.search(r"user/sofmtax is not on the Hub, or is private: check the name", error), error
    for command in (["doctor", "user/nothing"], ["recover", "user/nothing", tmp_path / "recovered"]):
        result = client.command(*command)
        assert result.code == 1 and re.fullmatch(r"error: .*user/nothing is not on the Hub.*\n", result.errors)
    program = """
        import mhla_hf
        try:
            mhla_hf.load_pipeline("user/language")
        except OSError as error:
            print(error)
    """
    assert client.check(program).strip() == "user/language has no file model_index.json."


def test_hub_that_is_out_of_reach(hub, client, pushed, tmp_path):
    """Neither the network nor HF_HUB_OFFLINE stops what was downloaded earlier."""
    offline = "from huggingface_hub import constants; constants.HF_HUB_OFFLINE = True"
    program = f"{offline}; from mhla_hf.cli.main import app; app(['convert', 'user/softmax', '{tmp_path}/none', '-q'])"
    result = client.run(program)
    assert re.fullmatch(r"error: .*user/softmax is not in the cache, and HF_HUB_OFFLINE forbids.*\n", result.errors)
    with hub.unreachable():
        assert "the connection to the Hub failed for user/mhla" in load(client, pushed)
        assert "the connection to the Hub failed for user/softmax" in convert(client, tmp_path / "converted")
    assert load(client, pushed) == "loaded []"
    assert convert(client, tmp_path / "converted") == ""
    with hub.unreachable():
        assert load(client, pushed) == "loaded []"
        assert convert(client, tmp_path / "again") == ""
    hub.inject("GET HEAD", "", 503, times=None)
    assert load(client, pushed).startswith("loaded")
    assert convert(client, tmp_path / "once-more") == ""


def test_download_goes_on_where_the_connection_broke(hub, client, pushed):
    """Within one call; what it had of a file when it was killed is downloaded again, and whole files are not."""
    hub.inject("GET", WEIGHTS, "drop", times=3)
    client.check("""
        from huggingface_hub import constants, snapshot_download
        constants.DOWNLOAD_CHUNK_SIZE = 1000
        snapshot_download("user/softmax", max_workers=1)
    """)
    ranges = [request.headers.get("range") for request in hub.requests if re.search(WEIGHTS, request.path)]
    assert [value for value in ranges if value and value != "bytes=0-"]
    client.clear_cache()
    hub.requests.clear()
    stopped = hub.inject("GET", WEIGHTS, "hang", skip=1)
    process = client.start(
        "from huggingface_hub import snapshot_download; snapshot_download('user/mhla', max_workers=1)"
    )
    assert stopped.reached.wait(60)
    os.kill(process, signal.SIGKILL)
    assert client.wait().code == -signal.SIGKILL
    hub.heal()
    first, second = [request.path for request in hub.requests if re.search(WEIGHTS, request.path)]
    hub.requests.clear()
    assert load(client, pushed) == "loaded []"
    again = [request.path for request in hub.requests if re.search(WEIGHTS, request.path)]
    assert second in again and first not in again


@pytest.mark.parametrize("effect", [503, "drop"])
def test_language_models_whose_download_fails(effect, hub, client, pushed):
    """The message is transformers' own; nothing that is damaged or incomplete stays in the cache."""
    program = """
        from tests import hub_models
        try:
            model = hub_models.load("language", "user/language")
        except OSError as error:
            print("failed", error)
        else:
            expected = hub_models.output("language", hub_models.make("language"))
            assert (hub_models.output("language", model) == expected).all()
            print("loaded")
    """
    hub.inject("GET", WEIGHTS, effect, times=None)
    answer = client.check(program)
    assert answer.startswith("failed") and "user/language" in answer
    hub.heal()
    assert client.check(program).strip() == "loaded"


def test_damage_that_the_libraries_do_not_see(hub, client, pushed):
    """Their own `from_pretrained` compares no checksum over plain HTTP; `hf cache verify` does."""
    hub.inject("GET", WEIGHTS, "corrupt")
    client.check("from tests import hub_models; hub_models.load('language', 'user/language')")
    # What `hf cache verify` calls.
    verify = """
        from huggingface_hub import HfApi
        print([mismatch["path"] for mismatch in HfApi().verify_repo_checksums("user/language").mismatches])
    """
    assert client.check(verify).strip() == "['model.safetensors']"
    client.clear_cache()
    client.check("from tests import hub_models; hub_models.load('language', 'user/language')")
    assert client.check(verify).strip() == "[]"
