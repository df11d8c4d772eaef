"""The fleet: nodes that are reached by ssh and may vanish, and the jobs that move between them."""
