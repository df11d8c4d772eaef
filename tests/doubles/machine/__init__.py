"""A chroot that is a Proxmox host to Ansible, up in two seconds and gone with the process that asked for it.

Real: the files of a Debian root under an overlay, apt and dpkg with an archive of empty packages, ldconfig and
libraries that load, device nodes, users. Played: the kernel behind sysfs and /proc (`tests.doubles.host`), Proxmox VE's
commands, systemd, NVIDIA's installer. `boot` brings one up, `hold` is its process 1, `hosts` says which there are.
"""
