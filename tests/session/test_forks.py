# SPDX-License-Identifier: Apache-2.0
"""Who has what is no use in a forked process hears of each fork there, whatever happens to others."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, os, signal
from foundryd.forks import tell_of_forks

class Hears:
    def __init__(self, name, raises=False):
        self.name, self.raises, self.heard = name, raises, 0
        tell_of_forks(self)
    def forked(self):
        self.heard += 1
        if self.raises:
            raise OSError(self.name)

kept = [Hears("a"), Hears("b", raises=True), Hears("c"), Hears("d", raises=True), Hears("e")]
gone = Hears("gone", raises=True)
del gone
gc.collect()

def child():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        print([one.heard for one in kept], flush=True)
        if kept[0].heard == 1:
            child()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

child()
print([one.heard for one in kept])
"""


def test_everybody_hears_of_each_fork_in_the_child_only():
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1, 1, 1, 1, 1]", "[2, 2, 2, 2, 2]", "[0, 0, 0, 0, 0]"]
    assert "gone" not in done.stderr
