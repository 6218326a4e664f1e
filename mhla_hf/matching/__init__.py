# SPDX-License-Identifier: Apache-2.0
"""Matching: train MHLA layers, or blocks with them, towards the outputs of the originals on recorded calls."""
