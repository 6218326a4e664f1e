# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf serve`: a converted language model behind an API like OpenAI's, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from tests import ROOT
from tests.command_line import run_command
from tests.integrations.transformers.mhla_models import mhla_model
from tests.integrations.transformers.tiny_files import tokenizer


MESSAGES = [{"role": "user", "content": "how long is a longer prompt than one block"}]
TOKENS = 24
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

needs_server = pytest.mark.skipif(not is_serve_available(), reason='needs the extra "serve"')


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    """A tiny language model with MHLA, its tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("served") / "model"
    mhla_model("llama").save_pretrained(directory)
    characters = tokenizer("llama")
    characters.chat_template = CHAT_TEMPLATE
    characters.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def client(model_directory, tmp_path_factory):
    """OpenAI's client, connected to a server."""
    from openai import OpenAI

    folder, port = tmp_path_factory.mktemp("servers"), free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    environment.update({"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")})
    options = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "mhla_hf", "serve", str(model_directory), *options]
    with (folder / "log.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_for(port, process, folder / "log.txt")
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", timeout=60, max_retries=0)
    finally:
        process.terminate()
        process.wait(timeout=30)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port, server, log):
    import httpx

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')}")


def expected(directory, messages):
    """What the model itself continues a conversation with."""
    characters = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    inputs = characters.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return characters.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
@needs_server
def test_answers_are_those_of_the_model(client, model_directory):
    options = {"model": str(model_directory), "temperature": 0, "max_tokens": TOKENS}
    answer = client.chat.completions.create(messages=MESSAGES, **options)
    text = expected(model_directory, MESSAGES)
    assert len(text) >= TOKENS // 2
    assert answer.choices[0].message.content == text
    assert answer.usage.completion_tokens == TOKENS

    streamed = client.chat.completions.create(messages=MESSAGES, stream=True, **options)
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert "".join(pieces) == text
    assert sum(map(bool, pieces)) > 1


@needs_server
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["user/model", "--continuous-batching"], "--continuous-batching keeps keys and values in pages"),
        (["/no/such/model"], "/no/such/model"),
        (["--port", "1"], "a model must be given, directory or Hub id: mhla-hf serve MODEL"),
        (["{encoder}", "--device", "cpu"], "is a BertForMaskedLM, which generates no text; serve a language model"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("uvicorn.Server.run", interrupted)
    encoder = tmp_path / "encoder"
    mhla_model("bert").save_pretrained(encoder)
    arguments = [argument.format(encoder=encoder) for argument in arguments]
    result = run_command("serve", *arguments, code=1, columns=300)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and words in lines[0]


@needs_server
def test_ctrl_c_ends_with_its_own_code(model_directory, monkeypatch):
    # What the server raises after it has closed its connections.
    monkeypatch.setattr("uvicorn.Server.run", interrupted)
    run_command("serve", model_directory, "--device", "cpu", code=130)


def interrupted(server):
    raise KeyboardInterrupt
