# SPDX-License-Identifier: Apache-2.0
"""The test of kernels before their first use: what it finds, what it says, and what it remembers."""

from __future__ import annotations

import logging

import pytest
import torch

from mhla_hf import MHLA, MHLAConfig, ops
from mhla_hf.layers.state import TokenSequence
from mhla_hf.ops import backends, choose_backend, kernel_cases
from mhla_hf.ops.backends import kernel_failure, kernels_pass

from .triton_checks import DEVICES


pytest.importorskip("triton")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles its kernels here")
WIDTH = 8


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process without verdicts, an empty folder, and tests on the CPU, where kernels are interpreted."""
    monkeypatch.setenv("MHLA_HF_HOME", str(tmp_path))
    monkeypatch.setattr(backends, "needs_test", lambda device: True)
    monkeypatch.setattr(backends, "interprets_kernels", lambda: True)
    backends._test_kernels.cache_clear()
    yield
    backends._test_kernels.cache_clear()


@pytest.fixture
def checks(monkeypatch):
    """The tests that have run: family and direction. They find what is set for them, by default nothing."""
    seen: list[tuple[str, bool]] = []
    failures: dict[tuple[str, bool], str] = {}

    def compare_kernels(family, device, dtype, width, value_width, repeats, normalizer, *, backward):
        seen.append(
            (family, backward) if (repeats, normalizer) == (1, "query") else (family, backward, repeats, normalizer)
        )
        return {}, failures.get((family, backward), "")

    monkeypatch.setattr(ops, "compare_kernels", compare_kernels, raising=False)
    compare_kernels.seen, compare_kernels.failures = seen, failures
    return compare_kernels


def tokens(*shape: int) -> list[torch.Tensor]:
    return list(torch.randn(3, *(shape or (1, 6, 2, WIDTH)), generator=torch.Generator().manual_seed(0)))


def choose(family: str = "block") -> str:
    with torch.no_grad():
        return choose_backend("triton", *tokens(), family=family)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("family", kernel_cases.FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_pass(device, family, backward):
    assert kernel_failure(family, torch.device(device), torch.float32, WIDTH, WIDTH, backward) == ""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["block", "small", "causal", "decode", "fused"])
def test_grouped_queries_without_a_normalizer_pass(family, device):
    kind = torch.device(device), torch.float32, WIDTH, WIDTH, kernel_cases.FAMILIES[family].has_gradients, 3, "none"
    assert kernel_failure(family, *kind) == ""


def test_each_family_is_checked_once(checks):
    assert [choose("block"), choose("block"), choose("causal")] == ["triton"] * 3
    assert checks.seen == [("block", False), ("causal", False)]


def test_a_verdict_is_one_of_its_kind(checks):
    """Another normaliser of the kernels, or other queries that share a key, are tested by themselves."""
    checks.failures["block", False] = "no"
    query, _, value = tokens(1, 6, 4, WIDTH)
    with torch.no_grad():
        for normalizer in ("query", "none", "block_query"):
            kernels_pass("block", query, value[:, :, :2], normalizer=normalizer)
    assert checks.seen == [("block", False, 3, "query"), ("block", False, 3, "none")]


def test_what_passes_is_remembered_for_the_device_and_the_releases(checks, monkeypatch):
    checks.failures["causal", False] = "wrong"
    for _ in range(2):
        assert [choose("block"), choose("causal")] == ["triton", "torch"]
        # The next process.
        backends._test_kernels.cache_clear()
    assert checks.seen == [("block", False), ("causal", False), ("causal", False)]
    monkeypatch.setattr(torch, "__version__", "another")
    assert choose("block") == "triton" and checks.seen[3:] == [("block", False)]


def test_gradients_are_checked_where_they_may_be_wanted(checks):
    query, _, value = tokens()
    assert kernels_pass("block", query, value)
    assert checks.seen == [("block", False), ("block", True)]


@on_cpu
def test_wrong_numbers_lead_to_plain_torch(monkeypatch, caplog):
    """A fault in the kernels themselves: the layer's output is right, and one warning says what to report."""
    from mhla_hf.ops.triton import block

    right = block.triton_block_mhla_attention
    monkeypatch.setattr(block, "triton_block_mhla_attention", lambda *args, **options: 1.1 * right(*args, **options))
    config = MHLAConfig(blocks=(2, 2), normalizer="block_query", backend="torch")
    layer = MHLA(config, hidden_size=8, num_heads=2, head_dim=WIDTH)
    with caplog.at_level(logging.INFO, logger="mhla_hf"), torch.no_grad():
        expected = layer(*tokens(1, 16, 2, WIDTH), grid=(4, 4))
        layer.config = config.replace(backend="triton")
        for _ in range(2):
            torch.testing.assert_close(layer(*tokens(1, 16, 2, WIDTH), grid=(4, 4)), expected)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    for part in ("block kernels", "forward, torch.float32", "output is off by 0.1 ", "doctor"):
        assert part in message


def test_a_family_that_fails_is_reported_once(checks, caplog):
    checks.failures["block", False] = "out of resource"
    with caplog.at_level(logging.INFO, logger="mhla_hf"):
        assert [choose(), choose(), choose("causal")] == ["torch", "torch", "triton"]
    assert len(caplog.records) == 1 and "out of resource" in caplog.text
    assert checks.seen == [("block", False), ("causal", False)]


@pytest.mark.parametrize(
    "fault, expected",
    [
        (RuntimeError("out of resource: shared memory\nthe rest"), "RuntimeError: out of resource: shared memory"),
        (float("nan"), "output is off by nan of its size"),
    ],
    ids=["exception", "nan"],
)
def test_what_is_wrong_with_kernels(fault, expected, monkeypatch):
    def kernel_errors(*arguments):
        if isinstance(fault, Exception):
            raise fault
        return {"output": (fault, fault), "gradient of key": (1e-6, 1e-6)}

    monkeypatch.setattr(kernel_cases, "_kernel_errors", kernel_errors)
    assert kernel_failure("block", torch.device("cpu"), torch.float32, WIDTH, WIDTH, False) == expected


@on_cpu
def test_single_numbers_that_are_wrong_show(monkeypatch):
    """One number in a thousand, by a third of its size, is one in a hundred of the whole."""
    right = kernel_cases._results

    def results(compute, inputs, sizes, backward):
        found = right(compute, inputs, sizes, backward)
        if inputs["query"].dtype == torch.float32:
            found["output"].view(-1)[0] *= 2
        return found

    monkeypatch.setattr(kernel_cases, "_results", results)
    monkeypatch.setitem(kernel_cases.TOLERANCES, torch.float32, 0.1)
    monkeypatch.setattr(kernel_cases, "ELEMENT_TOLERANCE", 1)
    found = kernel_failure("block", torch.device("cpu"), torch.float32, WIDTH, WIDTH, False)
    assert found.startswith("numbers of output are off by ")


@on_cpu
def test_a_layer_falls_back_from_one_family_to_the_next(checks):
    checks.failures["fused", False] = "no"
    layer = MHLA(MHLAConfig(blocks=(2, 2), backend="triton"), hidden_size=8, num_heads=2, head_dim=WIDTH)
    with torch.no_grad():
        layer(*tokens(1, 15, 2, WIDTH), grid=(3, 5))
    assert checks.seen == [("fused", False), ("block", False)]
    layer = MHLA(
        MHLAConfig(causal=True, block_size=(4,), grid=(8,), backend="triton"),
        hidden_size=8,
        num_heads=2,
        head_dim=WIDTH,
    )
    with torch.no_grad():
        layer(*tokens(1, 6, 2, WIDTH), sequence=TokenSequence(True))
    assert checks.seen[2:] == [("causal", False)]


def test_failing_gradients_leave_inference_to_the_kernels(checks):
    checks.failures["block", True] = "wrong"
    query, _, value = tokens()
    assert not kernels_pass("block", query, value)
    with torch.no_grad():
        assert kernels_pass("block", query, value)


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_the_test_can_be_turned_off(value, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("MHLA_HF_KERNEL_CHECK", "1")
    assert backends.needs_test(torch.device("cuda")) and not backends.needs_test(torch.device("cpu"))
    monkeypatch.setenv("MHLA_HF_KERNEL_CHECK", value)
    assert not backends.needs_test(torch.device("cuda"))


def test_nothing_is_checked_while_a_graph_is_captured(checks, monkeypatch):
    checks.failures["block", False] = "no"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose() == "triton" and not checks.seen
    assert choose() == "torch"


def test_gradients_are_computed_in_the_thread_of_the_check(monkeypatch):
    """The autograd thread of a GPU may be waiting for the check, in the backward pass of a checkpointed layer."""
    found = []

    def kernel_errors(*arguments):
        found.append(torch._C._is_multithreading_enabled())
        return {}

    monkeypatch.setattr(kernel_cases, "_kernel_errors", kernel_errors)
    query, _, value = tokens()
    assert kernels_pass("block", query, value)
    assert found == [False, False] and torch._C._is_multithreading_enabled()


def test_compiled_code_is_checked_while_it_is_traced(checks):
    """Also for widths that are symbols by then."""
    checks.failures["causal", False] = "no"
    torch.compiler.reset()

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def double(query, value):
        block, causal = (kernels_pass(family, query, value) for family in ("block", "causal"))
        return query * (2 if block else 3) + (5 if causal else 0)

    query, _, value = tokens()
    for width in (7, 9):
        assert torch.equal(double(query[..., :width], value), query[..., :width] * 2)
    assert checks.seen == [("block", False), ("block", True), ("causal", False)]
