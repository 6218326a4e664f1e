# SPDX-License-Identifier: Apache-2.0
"""Where the package hooks into other libraries. Everything that touches their internals is in here."""
