# SPDX-License-Identifier: Apache-2.0
"""What is inside a module image: which code the driver takes from it, the names of that code's variables,
the image that has no other code, and what of its kernels that are not used need not be in it.

Everything here works on bytes, without a driver.  What cannot be read raises ``UnreadableImage``.
"""

from foundryd.capture.images.container import Entry, capability, chosen, entries
from foundryd.capture.images.cut import without_unused
from foundryd.capture.images.elf import is_cubin
from foundryd.capture.images.levels import CUTS, Cut, cuts
from foundryd.capture.images.prune import pruned
from foundryd.capture.images.strip import stripped
from foundryd.capture.images.survey import Listing, Summary, listings, summary
from foundryd.capture.images.variables import Variable

__all__ = [
    "CUTS",
    "Cut",
    "Entry",
    "Listing",
    "Summary",
    "Variable",
    "capability",
    "chosen",
    "cuts",
    "entries",
    "is_cubin",
    "listings",
    "pruned",
    "stripped",
    "summary",
    "without_unused",
]
