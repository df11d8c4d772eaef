"""The page that an operator keeps open: fleet, jobs, extraction, training, serving, stores; read only.

sources (`collect/`) → `Collector` → `Snapshot` (`model`) → pages, /metrics
"""
