# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf estimate`: what MHLA can gain in a model, from its configuration alone."""

from .candidates import Candidate, find_candidate, find_grid
from .estimating import Estimate, estimate, measure_block


__all__ = ["Candidate", "Estimate", "estimate", "find_candidate", "find_grid", "measure_block"]
