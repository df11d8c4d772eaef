"""The loop on one machine: one run file, one run folder, one function a verb."""
