"""One rank of ``python -m benchmarks link``, in its own network namespace: ``python -m benchmarks.link_rank FOLDER``.

FOLDER holds a pickled function and its arguments; what the function returns is left there, or the traceback.
"""

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path

START_TIMEOUT = 180.0
"""Seconds that importing may take, until the function watches over itself, and as many to end."""
_PR_SET_PDEATHSIG = 1


def main(folder: Path, parent: int) -> None:
    # A parent that is killed by SIGKILL has no time to end its ranks.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    faulthandler.dump_traceback_later(START_TIMEOUT, exit=True)
    rank = os.environ["RANK"]
    try:
        function, arguments = pickle.loads((folder / "call").read_bytes())
        result = pickle.dumps(function(*arguments))
        faulthandler.dump_traceback_later(START_TIMEOUT, exit=True)  # the interpreter, too, has to end in time
        (folder / f"{rank}.result").write_bytes(result)
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        # Without waiting for peers in destructors: they may be stuck.
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
