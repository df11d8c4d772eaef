"""From a profile to a served model that has proven itself: profile → preflight → launch line → canary."""

from drafthouse.serve.facts import Facts
from drafthouse.serve.findings import Finding
from drafthouse.serve.launch import LaunchLine, launch_line
from drafthouse.serve.load import load_profile
from drafthouse.serve.preflight import preflight
from drafthouse.serve.profile import CanarySpec, Profile

__all__ = ["CanarySpec", "Facts", "Finding", "LaunchLine", "Profile", "launch_line", "load_profile", "preflight"]
