# SPDX-License-Identifier: Apache-2.0
"""Looks at a machine and an environment, and says what would keep a daemon or a restore from working."""
