"""Planners and facts of a GPU host: pure functions over one snapshot, standard library only.

They run on the hosts (inside Ansible modules, Python 3.9+) and in the tests. The way through:
`gather(world)` reads a host into `HostFacts`; `plan(facts, desired)` says what to change or why not, as a `Plan`;
`apply(plan, world)` acts step by step and reads the world back.
"""
