"""How a job runs on a node: as a container, or as a process where there is no engine."""
