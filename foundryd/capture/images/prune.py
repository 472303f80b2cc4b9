# SPDX-License-Identifier: Apache-2.0
"""Images without the code that a device does not take."""

from __future__ import annotations

from foundryd.capture.images import elf
from foundryd.capture.images.container import ELF, Capability, architecture_of, chosen, container, entries, header_bytes
from foundryd.errors import UnreadableImage


def pruned(image: bytes, device: Capability) -> bytes:
    """The image that has only what the driver takes from this one on a device.

    One piece of compiled code comes out as the ELF file that it is.  Where the driver has a choice that the container
    does not decide (sm_90, sm_90a), and for PTX, which is compiled with options of its entry, it comes out as a
    container of these entries as they were, so that the choice stays the driver's.  An image that is one ELF file or
    PTX comes out as it is.
    Raises ``UnreadableImage``, saying why an image has to stay whole.
    """
    found = entries(image)
    if [e.alone for e in found] == [True]:
        return image
    if header_bytes(image) != len(container([])):
        raise UnreadableImage(f"its container has a header of {header_bytes(image)} bytes, not {len(container([]))}")
    for entry in found:
        # What is for later devices the driver cannot take, whatever it is.
        if entry.unusual and divmod(entry.architecture, 10) <= device:
            raise UnreadableImage(f"it has code for {entry.target} {entry.unusual}, and what that means is not known")
    kept = chosen(found, device)
    targets = [e.target for e in kept]
    if len(set(targets)) < len(targets):
        raise UnreadableImage(f"it has {len(targets)} pieces of code for {targets[0]}, which the driver may link")
    if kept[0].kind != ELF:
        return container(kept)
    files = []
    for entry in kept:
        file = elf.loadable(entry.code())
        if architecture_of(file) not in (0, entry.architecture):
            raise UnreadableImage(f"its code for {entry.target} says that it is for sm_{architecture_of(file)}")
        files.append(file)
    return files[0] if len(files) == 1 else container(kept)
