"""Settings that hold for every test."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# `examples` is not installed.  Last in line, so that the installed package is tested and not the checkout beside it.
sys.path.append(str(Path(__file__).parents[1]))

# The same examples on every run, and no limits on time: the machines that run this are shared.
settings.register_profile("pancake", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pancake")
