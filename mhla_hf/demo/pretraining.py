# SPDX-License-Identifier: Apache-2.0
"""Pretraining of the base pipeline, which is in `conversion/digits` of the repository and not in the wheel.

Importing this module without a checkout raises a `ValueError` that says so.
"""

from __future__ import annotations

from ..utils.imports import import_from_checkout


_digits = import_from_checkout("conversion.digits", "pretraining the demo's base (--from-scratch)")
PretrainingConfig, pretrain = _digits.PretrainingConfig, _digits.pretrain
