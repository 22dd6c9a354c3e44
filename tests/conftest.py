"""For all tests: the CPU platform, and a cache folder of their own, so that no test reads or writes the user's."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HFAX_HOME"] = tempfile.mkdtemp(prefix="hfax-tests-")
atexit.register(shutil.rmtree, os.environ["HFAX_HOME"], ignore_errors=True)
