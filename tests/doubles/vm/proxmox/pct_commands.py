#!/usr/bin/python3 -IS
"""Test double of Proxmox VE's `pct`: the same commands and files, carried out by this machine's real LXC.

What is translated is what a GPU needs: `devN` entries become a node of their own, a mount and a line of the device
cgroup, as pve-container's prestart hook does it; raw `lxc.` keys go through as they are. Changes of a running container
wait in [pve:pending], as they did before hotplug of devices came with Proxmox VE 9. `pct exec` is in the script that
calls this one.
"""

# pathlib would double the time that an emulated Python takes to start, so paths are text here.
# ruff: noqa: PTH101, PTH103, PTH105, PTH108, PTH116, PTH123, PTH208

import os
import re
import stat
import sys
import time

sys.path.insert(0, "/usr/share/proxmox-double")
from guest_config import GuestConfig

CONFIGS = "/etc/pve/lxc"
DEVICE = re.compile(
    r"^(?:path=)?(?P<path>/dev/[^,]+)"
    r"(?P<options>(?:,(?:deny-write=[01]|gid=\d+|uid=\d+|mode=0[0-7]{3}))*)$"
)


def die(text, status=255):
    print(text, file=sys.stderr)
    sys.exit(status)


def path_of(vmid):
    return f"{CONFIGS}/{vmid}.conf"


def load(vmid):
    try:
        with open(path_of(vmid)) as file:
            return GuestConfig(file.read())
    except FileNotFoundError:
        die(f"Configuration file 'nodes/{os.uname().nodename}/lxc/{vmid}.conf' does not exist", 2)


def save(vmid, config):
    temporary = f"{CONFIGS}/.{vmid}.conf.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write(config.text())
    os.chmod(temporary, 0o640)
    os.replace(temporary, path_of(vmid))


def call(*argv):
    """Run a program to its end, its output with ours."""
    return os.waitstatus_to_exitcode(os.waitpid(os.spawnvp(os.P_NOWAIT, argv[0], argv), 0)[1])


def running(vmid):
    with os.popen(f"lxc-info -n {int(vmid)} -sH 2>/dev/null") as answer:
        return answer.read().strip() == "RUNNING"


def wait_until(holds, timeout):
    end = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def checked_device(key, value):
    match = DEVICE.match(value)
    if not match:
        die(f"400 Parameter verification failed.\n{key}: invalid format - format error in '{value}'")
    if not stat.S_ISCHR(mode_of(match["path"])) and not stat.S_ISBLK(mode_of(match["path"])):
        die(f"{match['path']} is not a device")
    return value


def mode_of(path):
    try:
        return os.stat(path).st_mode
    except OSError as failure:
        die(f"Device {path} does not exist: {failure.strerror}")


# -- commands ----------------------------------------------------------------------------------------------------------


def show_list():
    print(f"{'VMID':<10} {'Status':<10} {'Lock':<12} Name")
    for name in sorted(os.listdir(CONFIGS)):
        if re.fullmatch(r"\d+\.conf", name):
            vmid = name[:-5]
            config = load(vmid)
            state = "running" if running(vmid) else "stopped"
            print(f"{vmid:<10} {state:<10} {config.main.get('lock', ''):<12} {config.main.get('hostname', '')}")


def show_config(vmid, current):
    config = load(vmid)
    values = config.main if current else config.coming()
    for key in sorted(values):
        print(f"{key}: {values[key]}")
    for key, value in config.raw:
        print(f"{key}: {value}")


def show_pending(vmid):
    config = load(vmid)
    for key in sorted({*config.main, *config.pending} - {"delete"}):
        if key in config.leaving:
            print(f"del {key}: {config.main[key]}")
            continue
        if key in config.main:
            print(f"cur {key}: {config.main[key]}")
        if key in config.pending:
            print(f"new {key}: {config.pending[key]}")


def change(vmid, arguments):
    config, later = load(vmid), running(vmid)
    if config.main.get("lock"):
        die(f"CT is locked ({config.main['lock']})")
    words = iter(arguments)
    for word in words:
        key, _, value = word.lstrip("-").partition("=")
        if not value:
            value = next(words, "")
        if not word.startswith("-") or not value:
            die(f"400 not enough arguments\nunable to parse option '{word}'")
        if key == "delete":
            for name in re.split(r"[,; ]+", value):
                config.delete(name, later)
        elif re.fullmatch(r"dev(\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])", key):
            config.set(key, checked_device(key, value), later)
        elif key in ("onboot", "memory", "cores", "hostname", "description", "tags", "startup"):
            config.set(key, value, False)
        else:
            die(f"400 unable to parse option\nUnknown option: {key}")
    save(vmid, config)


def start(vmid):
    if running(vmid):
        die(f"CT {vmid} already running")
    config = load(vmid)
    config.settle()
    save(vmid, config)
    home = f"/var/lib/lxc/{vmid}"
    devices = f"{home}/devices"
    os.makedirs(devices, exist_ok=True)
    for name in os.listdir(devices):
        os.unlink(f"{devices}/{name}")
    lines = [
        "lxc.include = /usr/share/lxc/config/common.conf",
        "lxc.arch = amd64",
        f"lxc.uts.name = {config.main.get('hostname', f'CT{vmid}')}",
        f"lxc.rootfs.path = dir:/var/lib/vz/private/{vmid}",
        "lxc.apparmor.profile = unconfined",
        "lxc.net.0.type = empty",
    ]
    for key in sorted(k for k in config.main if re.fullmatch(r"dev\d+", k)):
        lines += passed(config.main[key], devices)
    lines += [f"{key} = {value}" for key, value in config.raw]
    with open(f"{home}/config", "w") as file:
        file.write("\n".join(lines) + "\n")
    log = f"/var/log/lxc/{vmid}.log"
    status = call("lxc-start", "-n", str(vmid), "-l", "INFO", "-o", log)
    if status or not wait_until(lambda: running(vmid), 30):
        die(f"startup for container '{vmid}' failed, see {log}")


def passed(value, devices):
    """A `devN` entry: a node of the container's own, bound to its place, and allowed by number."""
    match = DEVICE.match(value)
    path, options = match["path"], dict(option.split("=") for option in match["options"].split(",") if option)
    try:
        found = os.stat(path)
    except OSError:
        die(f"Could not get mode or device ID of {path}")
    if not (stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode)):
        die(f"Could not get mode or device ID of {path}")
    major, minor = os.major(found.st_rdev), os.minor(found.st_rdev)
    node = f"{devices}/{path.replace('/', '_')}"
    os.mknod(node, stat.S_IFMT(found.st_mode) | 0o600, found.st_rdev)
    os.chmod(node, int(options.get("mode", "0660"), 8))
    os.chown(node, int(options.get("uid", 0)), int(options.get("gid", 0)))
    kind = "c" if stat.S_ISCHR(found.st_mode) else "b"
    rights = "r" if options.get("deny-write") == "1" else "rw"
    return [
        f"lxc.cgroup2.devices.allow = {kind} {major}:{minor} {rights}",
        f"lxc.mount.entry = {node} {path[1:]} none bind,create=file",
    ]


def shut_down(vmid, timeout, force):
    if not running(vmid):
        die(f"CT {vmid} not running")
    call("lxc-stop", "-n", str(vmid), "--timeout", str(timeout), *([] if force else ["--nokill"]))
    if not wait_until(lambda: not running(vmid), 5):
        die(f"command 'lxc-stop -n {vmid} --nokill --timeout {timeout}' failed: exit code 1")


def stop(vmid):
    call("lxc-stop", "-n", str(vmid), "--kill")


def push(vmid, source, target, options):
    if not running(vmid):
        die("can't push to a container that is not running")
    file = os.open(source, os.O_RDONLY)
    os.dup2(file, 0)
    script = 'cat >"$0" && chmod "$1" "$0" && chown "$2:$3" "$0"'
    wanted = [target, options.get("perms", "0644"), options.get("user", "0"), options.get("group", "0")]
    os.execvp("lxc-attach", ["lxc-attach", "-n", str(vmid), "--", "sh", "-c", script, *wanted])


def pull(vmid, source, target):
    file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.execvp("lxc-attach", ["lxc-attach", "-n", str(vmid), "--", "cat", source])


def unlock(vmid):
    config = load(vmid)
    config.main.pop("lock", None)
    save(vmid, config)


def options_of(words):
    """`--timeout 60`, `--timeout=60` and `-timeout 60`; a flag without a value is `1`."""
    found, left, rest = {}, [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            left.append(word)
            continue
        key, has_value, value = word.lstrip("-").partition("=")
        if not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else "1"
        found[key] = value
    return found, left


def main(argv):
    if not argv:
        die("ERROR: no command specified")
    command, words = argv[0], argv[1:]
    if command == "list":
        return show_list()
    if not words or not words[0].isdigit():
        die("400 not enough arguments")
    vmid, words = words[0], words[1:]
    if command == "set":
        return change(vmid, words)
    options, left = options_of(words)
    timeout = int(options.get("timeout", 60))
    if command == "config":
        return show_config(vmid, "current" in options)
    load(vmid)
    if command == "status":
        return print("status:", "running" if running(vmid) else "stopped")
    if command == "pending":
        return show_pending(vmid)
    if command == "start":
        return start(vmid)
    if command == "stop":
        return stop(vmid)
    if command == "shutdown":
        return shut_down(vmid, timeout, options.get("forceStop") == "1")
    if command == "reboot":
        shut_down(vmid, timeout, False)
        return start(vmid)
    if command == "push" and len(left) == 2:
        return push(vmid, *left, options)
    if command == "pull" and len(left) == 2:
        return pull(vmid, *left)
    if command == "unlock":
        return unlock(vmid)
    return die(f"ERROR: unknown command 'pct {command}'")


main(sys.argv[1:])
