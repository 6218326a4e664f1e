# SPDX-License-Identifier: Apache-2.0
"""Layer matching: recording the calls of attention layers, and training MHLA layers on them."""
