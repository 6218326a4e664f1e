# SPDX-License-Identifier: Apache-2.0
"""The namespace of this build's operators. Builds of other sources have others."""

import torch


_NAMESPACE = "{identifier}"

ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(name: str) -> str:
    """The full name of an operator of this build."""
    return f"{_NAMESPACE}::{name}"
