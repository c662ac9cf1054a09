"""What the fork server imports first: while it imports, a terminal's signals are the launcher's to answer.

The server itself ignores Ctrl-C only once it serves; a lost connection would end it, and with it all ranks,
before the launcher can say what ended them.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
