# SPDX-License-Identifier: Apache-2.0
"""Files, locks, messages and versions: helpers that know nothing of attention."""
