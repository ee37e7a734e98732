"""Sits at a terminal of 80 by 24 and watches a server with `tollgate top`.

    python terminal.py PROGRAM ADMIN_ADDRESS SERVER_ID

Stops the server for a while, so that it hangs; `top` must say so, and go when it is told to: by a key, and by SIGTERM. Either
way it must leave the terminal as it was.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time

PROGRAM, ADMIN, SERVER = sys.argv[1], sys.argv[2], int(sys.argv[3])
PATIENCE = 12
LEAVES = b"\x1b[?1049l"


class Top:
    def __init__(self):
        self.id, self.terminal = pty.fork()
        if self.id == 0:
            os.execv(PROGRAM, [PROGRAM, "top", "--admin", ADMIN])
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.said = b""

    def read(self, until):
        """Reads until there is this, or the end."""
        end = time.monotonic() + PATIENCE
        while until is None or until not in self.said:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.terminal], [], [], left)[0]:
                os.kill(self.id, signal.SIGKILL)
                sys.exit(f"waited in vain for {until or 'its end'}: {self.said[-2000:]!r}")
            try:
                self.said += os.read(self.terminal, 65536)
            except OSError:  # the other side is closed
                if until is None:
                    return
                sys.exit(f"it ended before {until}: {self.said[-2000:]!r}")

    def ended(self):
        self.read(None)
        _, status = os.waitpid(self.id, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert LEAVES in self.said, self.said[-200:]


by_key = Top()
by_key.read(b"allowed")
os.kill(SERVER, signal.SIGSTOP)
try:
    by_key.read(b"no response for ")
    os.write(by_key.terminal, b"q")
    by_key.ended()
finally:
    os.kill(SERVER, signal.SIGCONT)
print("went by a key")

by_signal = Top()
by_signal.read(b"allowed")
os.kill(by_signal.id, signal.SIGTERM)
by_signal.ended()
print("went by a signal")
