# SPDX-License-Identifier: Apache-2.0
"""The check of kernels before their first use: what it finds, what it says, and what it remembers."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from mhla_hf import MHLA, MHLAConfig, ops
from mhla_hf.layers.state import TokenSequence
from mhla_hf.ops import backends, choose_backend, kernel_cases, kernel_check
from mhla_hf.ops.kernel_check import VerdictFile, cache_directory, kernel_failure, kernels_pass

from .triton_checks import DEVICES


pytest.importorskip("triton")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles its kernels here")
CPU = torch.device("cpu")
WIDTH = 8


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process without verdicts, an empty folder, and checks on the CPU, where kernels are interpreted."""
    monkeypatch.setenv("MHLA_HF_HOME", str(tmp_path))
    monkeypatch.delenv("MHLA_HF_KERNEL_CHECK", raising=False)
    monkeypatch.setattr(kernel_check, "UNCHECKED_DEVICES", ())
    monkeypatch.setattr(backends, "INTERPRETED", True)
    restart(monkeypatch)


def restart(monkeypatch) -> None:
    """Forgets what a process knows, as a new one would."""
    monkeypatch.setattr(kernel_check, "_verdicts", {})
    monkeypatch.setattr(kernel_check, "_warned", set())


@pytest.fixture
def checks(monkeypatch):
    """The checks that have run: family and direction. Their errors are those set for them, by default none."""
    seen: list[tuple[str, bool]] = []
    errors: dict[str, float | Exception] = {}

    def kernel_errors(family, device, dtype, width, value_width, *, backward):
        seen.append((family, backward))
        outcome = errors.get(family, 0.0)
        if isinstance(outcome, Exception):
            raise outcome
        return {"output": outcome}

    monkeypatch.setattr(ops, "kernel_errors", kernel_errors, raising=False)
    kernel_errors.seen, kernel_errors.errors = seen, errors
    return kernel_errors


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
    (path,) = (cache_directory() / "kernel_checks").iterdir()
    verdicts = json.loads(path.read_text())["verdicts"]
    assert set(verdicts.values()) == {""} and len(verdicts) == 1 + backward


def test_each_family_is_checked_once(checks):
    assert [choose("block"), choose("block"), choose("causal")] == ["triton"] * 3
    assert checks.seen == [("block", False), ("causal", False)]


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
    for part in ("block kernels", "forward, float32", "output is off by 0.1 ", torch.__version__, "triton", "doctor"):
        assert part in message


@pytest.mark.parametrize(
    "fault", [RuntimeError("out of resource: shared memory\nthe rest"), float("nan")], ids=["exception", "nan"]
)
def test_a_family_that_fails_is_reported_once_and_remembered(fault, checks, caplog, monkeypatch):
    checks.errors["block"] = fault
    expected = (
        "RuntimeError: out of resource: shared memory" if isinstance(fault, Exception) else "output is not finite"
    )
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="mhla_hf"):
            assert [choose(), choose(), choose("causal")] == ["torch", "torch", "triton"]
        assert len(caplog.records) == 1 and expected in caplog.text and "the rest" not in caplog.text
        # The next process reads what this one found.
        restart(monkeypatch)
    assert checks.seen == [("block", False), ("causal", False)]


@on_cpu
def test_a_layer_falls_back_from_one_family_to_the_next(checks):
    checks.errors["fused"] = RuntimeError("no")
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


def test_failing_gradients_leave_inference_to_the_kernels(checks, monkeypatch):
    monkeypatch.setattr(kernel_check, "judge", lambda errors, dtype: "wrong" if checks.seen[-1][1] else "")
    query, _, value = tokens()
    assert not kernels_pass("block", query, value)
    with torch.no_grad():
        assert kernels_pass("block", query, value)


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("full"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        PermissionError("cannot write to the cache of compiled kernels"),
    ],
    ids=["torch", "triton", "file"],
)
def test_what_may_pass_is_no_lasting_verdict(error, checks, monkeypatch):
    checks.errors["block"] = error
    assert choose() == choose() == "torch"
    restart(monkeypatch)
    del checks.errors["block"]
    assert choose() == "triton"


@pytest.mark.parametrize("content", ["", "[]", '{"verdicts": 3}', '{"verdicts": {"a": 1}}', "\0" * 100])
def test_damaged_files_are_ignored_and_replaced(content, checks):
    path = VerdictFile(CPU).path
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert choose() == "triton"
    assert list(VerdictFile(CPU).read().values()) == [""]


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_the_check_can_be_turned_off(value, checks, monkeypatch):
    monkeypatch.setenv("MHLA_HF_KERNEL_CHECK", value)
    checks.errors["block"] = RuntimeError("no")
    assert choose() == "triton" and not checks.seen


def test_nothing_is_checked_while_a_graph_is_captured(checks, monkeypatch):
    checks.errors["block"] = RuntimeError("no")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose() == "triton" and not checks.seen
    assert choose() == "torch"


def test_gradients_are_computed_in_the_thread_of_the_check(monkeypatch):
    """The autograd thread of a GPU may be waiting for the check, in the backward pass of a checkpointed layer."""
    found = []

    def kernel_errors(*args, **options):
        found.append(torch._C._is_multithreading_enabled())
        return {}

    monkeypatch.setattr(ops, "kernel_errors", kernel_errors, raising=False)
    query, _, value = tokens()
    assert kernels_pass("block", query, value)
    assert found == [False, False] and torch._C._is_multithreading_enabled()


def test_compiled_code_is_checked_while_it_is_traced(checks):
    """Also for widths that are symbols by then."""
    checks.errors["causal"] = RuntimeError("no")
    torch.compiler.reset()

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def double(query, value):
        block, causal = (kernels_pass(family, query, value) for family in ("block", "causal"))
        return query * (2 if block else 3) + (5 if causal else 0)

    query, _, value = tokens()
    for width in (7, 9):
        assert torch.equal(double(query[..., :width], value), query[..., :width] * 2)
    assert checks.seen == [("block", False), ("block", True), ("causal", False)]
