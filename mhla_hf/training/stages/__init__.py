# SPDX-License-Identifier: Apache-2.0
"""Stages of training: layer matching, distillation and fine-tuning, and their losses."""
