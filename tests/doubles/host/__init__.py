"""A Proxmox host as a folder: `tree` lays its files, `kernel` acts behind them, `commands` are its programs."""
