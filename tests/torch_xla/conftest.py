"""These tests need torch_xla and the torch that it was built against: `make test` runs them in an environment of their own.

.venv-torch_xla/bin/python -m pytest tests/torch_xla
"""

import importlib.util
import os

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["*"]
else:
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiles in a fifth of the time
