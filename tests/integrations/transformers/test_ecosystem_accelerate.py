# SPDX-License-Identifier: Apache-2.0
"""accelerate and FSDP2: weights that are not where the computation is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, dispatch_model, infer_auto_device_map

import mhla_hf  # noqa: F401

from .mhla_models import first_output, mhla_model
from .tiny_models import inputs


OPTIONS = {"output_gate": True, "output_norm": True}
NAMES = ["llama", "bert", "vit"]


def case(name):
    """A model, inputs for it, and what it gives for them."""
    model = mhla_model(name, **OPTIONS)
    batch = inputs(name, padding=None if name == "vit" else "right")
    with torch.no_grad():
        return model, batch, first_output(model, **batch)


@torch.no_grad()
def assert_same(model, batch, expected):
    torch.testing.assert_close(first_output(model, **batch), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_cpu_offload(name):
    model, batch, expected = case(name)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_same(model, batch, expected)


@pytest.mark.parametrize("name", NAMES)
def test_some_layers_on_disk(name, tmp_path):
    model, batch, expected = case(name)
    half = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) // 2
    devices = infer_auto_device_map(model, {"cpu": half}, no_split_module_classes=model._no_split_modules)
    assert set(devices.values()) == {"cpu", "disk"}
    dispatch_model(model, devices, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert_same(model, batch, expected)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _sharded_gradients(rank, world, port, folder):
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        model = mhla_model("llama", **OPTIONS)
        mesh = dist.init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        batch = {key: value[rank::world] for key, value in inputs("llama", padding="right").items()}
        output = first_output(model, **batch)
        output.square().mean().backward()
        gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        torch.save({"output": output.detach(), "gradients": gradients}, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fully_sharded(world, tmp_path):
    """Outputs and gradients of FSDP2 are those of the whole model; two processes share the batch."""
    if world == 1:
        _sharded_gradients(0, 1, _free_port(), tmp_path)
    else:
        torch.multiprocessing.spawn(_sharded_gradients, (world, _free_port(), str(tmp_path)), nprocs=world)
    model = mhla_model("llama", **OPTIONS)
    output = first_output(model, **inputs("llama", padding="right"))
    output.square().mean().backward()
    for rank in range(world):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(saved["output"], output.detach()[rank::world], atol=1e-5, rtol=1e-4)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(saved["gradients"][name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
