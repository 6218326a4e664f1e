# SPDX-License-Identifier: Apache-2.0
"""The application's server, called by programs: answers, limits, queue, cancelling, and what it keeps to itself."""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from mhla_hf.app.limits import Limits

from .conftest import VIDEO, running, wait_until


gradio_client = pytest.importorskip("gradio_client", reason="gradio is not installed")
pytest.importorskip("gradio", reason="gradio is not installed")


@pytest.fixture(scope="module")
def server(saved_pipeline):
    with running(saved_pipeline, Limits(queue=1, prompt=40)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return gradio_client.Client(server.url, verbose=False, analytics_enabled=False)


@contextmanager
def slow(handlers, seconds: float = 0.1):
    """Makes both denoisers slow, and counts their calls."""
    calls: list[str] = []

    def wait(module, args):
        calls.append(type(module).__name__)
        time.sleep(seconds)

    comparison = handlers.comparison
    hooks = [
        pipeline.transformer.register_forward_pre_hook(wait) for pipeline in (comparison.original, comparison.mhla)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def is_still(calls: list[str]) -> bool:
    """True once no more calls are made; waits for that."""
    for _ in range(50):
        before = len(calls)
        time.sleep(0.4)
        if len(calls) == before:
            return True
    return False


def frames(path: str) -> np.ndarray:
    import imageio.v3

    return np.asarray(imageio.v3.imread(path))


def test_both_models_answer_from_the_same_noise(server, client):
    first: dict[str, list] = {}

    def keep(module, args, kwargs):
        first.setdefault(type(module).__name__, []).append(kwargs["hidden_states"].clone())

    comparison = server.handlers.comparison
    hooks = [
        pipeline.transformer.register_forward_pre_hook(keep, with_kwargs=True)
        for pipeline in (comparison.original, comparison.mhla)
    ]
    try:
        status, original, own, times = client.predict(*VIDEO.values(), api_name="/generate")
    finally:
        for hook in hooks:
            hook.remove()
    assert status == ""
    assert set(first) == {"WanTransformer3DModel", "MHLAWanTransformer3DModel"}
    inputs = [calls[0] for calls in first.values()]
    assert (inputs[0] == inputs[1]).all()
    # Two steps, and guidance.
    assert [len(calls) for calls in first.values()] == [4, 4]
    videos = [frames(answer) for answer in (original, own)]
    assert [video.shape for video in videos] == [(9, 160, 320, 3)] * 2
    assert (videos[0] != videos[1]).any()
    assert "| Softmax attention |" in times and "| MHLA |" in times and "per step" in times
    again = client.predict(**VIDEO, api_name="/generate")
    assert (frames(again[2]) == videos[1]).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 1000}, "Steps must be a whole number from 1 to 50, not 1000"),
        ({"steps": "2"}, "Steps must be a whole number from 1 to 50, not '2'"),
        ({"seed": -1}, "Seed must be a whole number from 0"),
        ({"guidance_scale": 1e9}, "Guidance must be a number from 0 to 30"),
        ({"height": 17}, "Height must be a multiple of 16, not 17"),
        ({"height": 512, "width": 512}, "Height × Width is 262,144 pixels; at most 65,536 are allowed here"),
        ({"num_frames": 401}, "Frames must be a whole number from 1 to 33, not 401"),
        ({"num_frames": 8}, "Frames must be 1 plus a multiple of 4"),
        ({"prompt": "a" * 41}, "Prompt has 41 characters; at most 40 are taken here"),
        ({"prompt": "  "}, "Prompt must be a text, and not empty"),
        ({"prompt": None}, "Prompt must be a text"),
        ({"prompt": {"path": "/etc/passwd"}}, "Prompt must be a text"),
        ({"steps": None}, "Steps must be a whole number"),
    ],
)
def test_requests_beyond_the_limits_are_refused(server, client, change, message):
    with slow(server.handlers, 0) as calls:
        with pytest.raises(gradio_client.exceptions.AppError, match=message) as error:
            client.predict(**{**VIDEO, **change}, api_name="/generate")
        assert "\n" not in str(error.value).strip()
    assert calls == []


def test_functions_check_whatever_reaches_them(server):
    """Components check numbers too, in other words: this is what stands behind them."""
    import gradio

    for values in [(), (7,) * 7, ("a cat", 1000, 0, 4.0, 32, 64, 9), ("a cat", 2, 0, float("nan"), 32, 64, 9)]:
        with pytest.raises(gradio.Error):
            next(server.handlers.compare(*values))
    for values in [("nothing", "0", 0), ("blocks.0.attn1", "9", 0), ("blocks.0.attn1", [], 0), (None, None, None)]:
        with pytest.raises(gradio.Error):
            server.handlers.mixing(*values)
    with pytest.raises(gradio.Error, match="Block must be a whole number from 0 to 11"):
        server.handlers.mixing("blocks.0.attn1", "0", 12)


def test_cancelling_stops_the_work(server, client):
    with slow(server.handlers) as calls:
        job = client.submit(**{**VIDEO, "steps": 40}, api_name="/generate")
        wait_until(lambda: calls)
        job.cancel()
        assert is_still(calls)
        # Two calls a step, of two models.
        assert len(calls) < 60 and set(calls) == {"WanTransformer3DModel"}
    assert client.predict(**VIDEO, api_name="/generate")[0] == ""


def test_leaving_stops_the_work(server):
    with slow(server.handlers) as calls:
        index = next(index for index, function in server.page.fns.items() if function.api_name == "generate")
        body = {"data": list({**VIDEO, "steps": 40}.values()), "fn_index": index, "session_hash": "visitor"}
        with httpx.Client(base_url=server.url, timeout=30) as visitor:
            visitor.post("gradio_api/queue/join", json=body).raise_for_status()
            with visitor.stream("GET", "gradio_api/queue/data", params={"session_hash": "visitor"}) as stream:
                for _ in stream.iter_lines():
                    if calls:
                        break
        assert is_still(calls)
        assert len(calls) < 60


def test_work_that_nobody_waits_for_is_stopped(server, monkeypatch):
    monkeypatch.setattr("mhla_hf.app.handlers._MOST_UNREAD", 5)
    with slow(server.handlers, 0.2) as calls:
        body = {"data": list({**VIDEO, "steps": 40}.values())}
        httpx.post(server.url + "gradio_api/call/generate", json=body, timeout=30).raise_for_status()
        wait_until(lambda: calls)
        assert is_still(calls)
        assert len(calls) < 60


def test_a_full_queue_refuses_and_says_so(server, client):
    with slow(server.handlers, 0.2) as calls:
        jobs = [client.submit(**{**VIDEO, "steps": 50}, api_name="/generate")]
        wait_until(lambda: calls)
        jobs.append(client.submit(**VIDEO, api_name="/generate"))
        wait_until(lambda: server.waiting() == 1)
        with pytest.raises(Exception, match="Queue is full"):
            client.predict(**VIDEO, api_name="/generate")
        for job in jobs:
            job.cancel()
        assert is_still(calls)


def test_the_queue_cannot_be_passed_by(server):
    for route in ("gradio_api/run/generate", "gradio_api/api/generate", "gradio_api/run/predict"):
        answer = httpx.post(server.url + route, json={"data": list(VIDEO.values()), "fn_index": 0}, timeout=30)
        assert answer.status_code >= 400, route


def test_no_files_of_the_machine_are_served(server, saved_pipeline):
    for path in ("/etc/passwd", saved_pipeline.model / "model_index.json", Path(__file__), "pyproject.toml"):
        answer = httpx.get(f"{server.url}gradio_api/file={path}", timeout=30)
        assert answer.status_code in (403, 404), path
    upload = httpx.post(server.url + "gradio_api/upload", files={"files": ("a.bin", b"0" * 5000)}, timeout=30)
    assert upload.status_code >= 400


def test_mixing_pictures_differ_by_layer_head_and_block(server, client):
    pictures = set()
    for layer, head, block in [("blocks.0.attn1", "0", 0), ("blocks.0.attn1", "0", 5), ("blocks.1.attn1", "1", 5)]:
        path = client.predict(layer, head, block, api_name="/mixing")
        pictures.add(Path(path).read_bytes())
    assert len(pictures) == 3


def test_speed_is_measured_once(server, client):
    status, picture, table = client.predict(api_name="/speed")
    assert (status, Path(picture).read_bytes()[:4]) == ("", b"\x89PNG")
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["tokens", "384"]
    assert "heads of width 12" in table
    # Measured again, some digit would differ.
    assert client.predict(api_name="/speed")[2] == table


def test_nothing_is_left_behind_and_nobody_else_is_asked(server, client, monkeypatch):
    made: list[Path] = []

    class Recorded(tempfile.TemporaryDirectory):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(Path(self.name))

    monkeypatch.setattr("mhla_hf.app.handlers.TemporaryDirectory", Recorded)
    client.predict(**VIDEO, api_name="/generate")
    assert len(made) == 1
    wait_until(lambda: not made[0].exists())
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "mhla-hf-app"])
    assert set(server.connections) <= {"127.0.0.1", "localhost", "::1"}


def test_generations_end_at_their_time_limit(saved_pipeline):
    with running(saved_pipeline, Limits(seconds=0.5)) as server, slow(server.handlers) as calls:
        client = gradio_client.Client(server.url, verbose=False, analytics_enabled=False)
        with pytest.raises(gradio_client.exceptions.AppError, match="stopped after 0.5 seconds, the limit here"):
            client.predict(**{**VIDEO, "steps": 40}, api_name="/generate")
        assert len(calls) < 15


def test_language_models_answer_with_texts(saved_language_model):
    with running(saved_language_model, Limits(new_tokens=12)) as server:
        client = gradio_client.Client(server.url, verbose=False, analytics_enabled=False)
        request = {"prompt": "once upon", "new_tokens": 12, "temperature": 1.0, "seed": 1}
        answers = client.predict(**request, api_name="/generate")
        assert all(isinstance(text, str) and text for text in answers[1:3])
        assert "per token" in answers[3]
        assert client.predict(**request, api_name="/generate")[1:3] == answers[1:3]
        assert client.predict(**{**request, "seed": 2}, api_name="/generate")[1] != answers[1]
        with pytest.raises(gradio_client.exceptions.AppError, match="New tokens must be a whole number from 1"):
            client.predict(**{**request, "new_tokens": 13}, api_name="/generate")
