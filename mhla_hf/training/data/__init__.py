# SPDX-License-Identifier: Apache-2.0
"""Training data: files and captions, encoding, caches, batches and their order."""
