"""Parts of gpu_sglang.py: a served folder, servers and their clock, requests, and our own account of the same text."""
