"""These tests need eight devices: `make test` runs them in a process of their own, with eight virtual CPU devices.

HFAX_TESTS_DEVICES=8 python -m pytest tests/sharding
"""

import os

if "xla_force_host_platform_device_count=8" not in os.environ.get("XLA_FLAGS", ""):
    collect_ignore_glob = ["*"]
