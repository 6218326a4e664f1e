# SPDX-License-Identifier: Apache-2.0
"""The console script `mhla-hf`."""
