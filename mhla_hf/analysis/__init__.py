# SPDX-License-Identifier: Apache-2.0
"""What MHLA layers attend to: attention matrices, their statistics, and pictures of them."""
