# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of public names run, and print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest


MODULES = (
    "mhla_hf",
    "mhla_hf.analysis",
    "mhla_hf.conversion",
    "mhla_hf.layers",
    "mhla_hf.ops",
    "mhla_hf.recovery",
    "mhla_hf.training",
)
MUST_HAVE_ONE = {
    "BlockLayout",
    "MHLAConfig",
    "convert",
    "convert_pretrained",
    "from_preset",
    "load_pipeline",
    "mhla_attention",
    "resample_mixing",
    "supported_models",
}


def _examples() -> dict[str, doctest.DocTest]:
    """The examples of every public function and class (its methods' too) by name; empty globals, so each imports."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), {}
    for module in MODULES:
        public = importlib.import_module(module)
        for name in public.__all__:
            value = getattr(public, name)
            if callable(value) and ">>>" in (value.__doc__ or ""):
                found.update({test.name: test for test in finder.find(value, name, module=False, globs={})})
    return {name: test for name, test in found.items() if test.examples}


EXAMPLES = _examples()


def test_the_main_names_have_examples():
    assert set(EXAMPLES) >= MUST_HAVE_ONE


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    result = runner.run(EXAMPLES[name], out=printed.append, clear_globs=False)
    assert not result.failed, "".join(printed)
