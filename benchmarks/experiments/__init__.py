# SPDX-License-Identifier: Apache-2.0
"""Experiments that check what the MHLA paper claims, at a size that a CPU trains, with a larger setting for a GPU."""
