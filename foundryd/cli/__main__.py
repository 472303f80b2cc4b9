# SPDX-License-Identifier: Apache-2.0
"""``python -P -m foundryd.cli``: the command without its script."""

from foundryd.cli import main

main()
