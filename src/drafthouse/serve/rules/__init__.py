"""What is known to go wrong, by theme; each module has `check(profile, facts)` that yields findings."""
