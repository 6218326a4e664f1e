# SPDX-License-Identifier: Apache-2.0
"""How tokens are divided into blocks and documents, and mixing weights resampled between layouts."""
