# SPDX-License-Identifier: Apache-2.0
"""From a converted model to one as good as its original: calibration, layer matching and distillation."""
