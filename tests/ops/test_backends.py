# SPDX-License-Identifier: Apache-2.0
"""Choice of the backend, and its log messages."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mhla_hf.ops import backends, choose_backend
from mhla_hf.ops.backends import _log_once, tf32_is_allowed, triton_failure, triton_obstacle


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize(
    "setting, on, off",
    [("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee"), ("fp32_precision", "tf32", "none")],
)
def test_either_setting_of_tf32_is_understood(setting, on, off):
    """torch refuses to read the older one once the newer one is in use."""
    settings = torch.backends.cuda.matmul
    if getattr(settings, "fp32_precision", None) is None:
        pytest.skip("this torch has one setting")
    assert not tf32_is_allowed()
    try:
        setattr(settings, setting, on)
        assert tf32_is_allowed()
    finally:
        setattr(settings, setting, off)
    assert not tf32_is_allowed()


def test_it_is_known_whether_triton_can_launch():
    """Without a GPU it cannot, and says so in place of raising an error."""
    pytest.importorskip("triton")
    assert (triton_failure() == "") == torch.cuda.is_available()


def test_the_environment_variable_wins(monkeypatch):
    monkeypatch.setenv("MHLA_HF_BACKEND", "torch")
    assert choose_backend("triton", *tokens(1, 4, 2, 8)) == "torch"
    monkeypatch.setenv("MHLA_HF_BACKEND", "cuda")
    with pytest.raises(ValueError, match="MHLA_HF_BACKEND='cuda' is not one of 'auto'"):
        choose_backend("auto", *tokens(1, 4, 2, 8))


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="backend='flash' is not one of 'auto', 'torch', 'triton'"):
        choose_backend("flash", *tokens(1, 4, 2, 8))


def test_falling_back_is_said_once(caplog):
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="mhla_hf"):
        for _ in range(2):
            assert choose_backend("triton", *tokens(1, 4, 2, 8, dtype=torch.float64)) == "torch"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_bfloat16_is_not_interpreted(monkeypatch):
    """Triton's interpreter would multiply its bits, which the tests of kernels mend for themselves."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "interprets_kernels", lambda: True)
    monkeypatch.setattr(backends, "INTERPRETED_DTYPES", (torch.float32, torch.float16))
    assert choose_backend("triton", *tokens(1, 4, 2, 8)) == "triton"
    assert choose_backend("triton", *tokens(1, 4, 2, 8, dtype=torch.bfloat16)) == "torch"


def test_gpus_that_kernels_are_not_for_are_refused(monkeypatch):
    """AMD's, and any where Triton interprets: before anything is compiled."""
    pytest.importorskip("triton")
    with FakeTensorMode():
        token = torch.empty(1, 4, 2, 8, device="cuda", dtype=torch.float16)
    monkeypatch.setattr(backends, "triton_failure", lambda: pytest.fail("Triton was asked to compile"))
    monkeypatch.setattr(backends, "interprets_kernels", lambda: True)
    assert "TRITON_INTERPRET" in triton_obstacle(token)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert triton_obstacle(token) == "the kernels are written for NVIDIA GPUs"


def test_few_tokens_are_left_to_torch_where_launches_take_longer(monkeypatch):
    times = {"block": (300.0, 200.0)}
    monkeypatch.setattr(backends, "HOST_TIMES", times)

    def few(count: int, family: str = "block") -> bool:
        return backends.has_few_tokens(family, torch.empty(1, count, 16, 64, device="meta"))

    counts = [2**power for power in range(20)]
    found = [few(count) for count in counts]
    assert found[0] and not found[-1] and found == sorted(found, reverse=True)
    assert not few(1, "decode")
    # No number is too small for kernels that are launched before plain torch would be.
    times["block"] = (200.0, 300.0)
    assert not any(few(count) for count in counts)


@pytest.mark.gpu
def test_few_tokens_are_for_auto_alone(monkeypatch):
    query, key, value = (tensor.cuda().half() for tensor in tokens(1, 4, 2, 8))
    for kernels, expected in ((300.0, "torch"), (100.0, "triton")):
        monkeypatch.setattr(backends, "HOST_TIMES", {"block": (kernels, 200.0)})
        assert choose_backend("auto", query, key, value, family="block") == expected
        assert choose_backend("triton", query, key, value, family="block") == "triton"


@pytest.mark.gpu
def test_float32_takes_the_kernels_where_nothing_is_multiplied():
    query, key, value = (tensor.cuda() for tensor in tokens(1, 4, 2, 8))
    assert choose_backend("auto", query, key, value) == "torch"
    assert choose_backend("auto", query, key, value, products=False) == "triton"
    assert choose_backend("auto", query.half(), key.half(), value.half()) == "triton"
