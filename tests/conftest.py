"""For all tests: the CPU platform, a cache folder of their own, so that no test reads or writes the user's, and Ctrl-C as usual."""

import atexit
import os
import shutil
import signal
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HFAX_HOME"] = tempfile.mkdtemp(prefix="hfax-tests-")
atexit.register(shutil.rmtree, os.environ["HFAX_HOME"], ignore_errors=True)

# A shell starts its background jobs with SIGINT ignored, and their children inherit it: the tests of Ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
