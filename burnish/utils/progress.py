"""Signs that a long stage gets further: whoever waits for it can tell slow from stuck.

`tick` is called where work is done piece by piece (a micro-batch, a round of decoding, a response that is scored, a file that
is written), from any thread. It costs less than a microsecond.
"""

import time

_last = time.monotonic()


def tick() -> None:
    """A piece of work is done in this process."""
    global _last
    _last = time.monotonic()


def idle_seconds() -> float:
    """Seconds since the last `tick` of this process; since it started, where there was none."""
    return time.monotonic() - _last
