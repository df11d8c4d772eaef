"""A virtual machine with four two-function display devices behind an emulated IOMMU, and snapshots of it.

It is emulated in software (TCG) even where /dev/kvm exists: a nested or partial KVM can be slower than none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.patience import until
from tests.ports import free_port

CARDS = 4
#: Vendor and device that every display function shows: an RTX 3090.
CARD_ID = "10de:2204"
#: The id in QEMU's own display devices, in the order of its bytes in memory.
_BOCHS_ID = bytes.fromhex("34121111")
_GUEST_ADDRESS = "10.0.2.15"
_APPEND = (
    "root=/dev/vda rw console=ttyS0 intel_iommu=on iommu=pt mitigations=off no_timer_check panic=-1 net.ifnames=0 quiet"
)


class MachineError(Exception):
    """The machine did not start, died, or did not answer; the message ends with its console."""


class EmulatorError(MachineError):
    """QEMU itself was ended by a signal: the fault of neither the guest nor what is tested."""


@dataclass(frozen=True)
class Image:
    """What a machine boots from, in one folder: see build-image.sh."""

    folder: Path

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd"

    @property
    def key(self) -> Path:
        return self.folder / "id"

    @property
    def host_key(self) -> str:
        """Type and key of the guest's ssh server, without the comment."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])


def relabelled_qemu(target: Path, card: str = CARD_ID) -> Path:
    """A private copy of QEMU whose display devices show the PCI id `vendor:device`; QEMU has no option for it.

    Raises:
        MachineError: the id does not occur exactly once in this build of QEMU.
    """
    program = shutil.which("qemu-system-x86_64")
    if program is None:
        raise MachineError("qemu-system-x86_64 is not installed")
    code = Path(program).read_bytes()
    if code.count(_BOCHS_ID) != 1:
        raise MachineError(f"{program} holds the id of its display devices {code.count(_BOCHS_ID)} times, not once")
    vendor, device = (int(part, 16).to_bytes(2, "little") for part in card.split(":"))
    target.write_bytes(code.replace(_BOCHS_ID, vendor + device))
    target.chmod(0o755)
    return target


@dataclass
class Machine:
    """One machine: its disks and its process live as long as the folder.

    Attributes:
        image: what it boots from; never written to.
        folder: disks, sockets, console log. Keep the path short: sockets have room for about 100 characters.
        memory_mib: of the guest.
    """

    image: Image
    folder: Path
    memory_mib: int = 2304
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._make_disks()
        self.qemu = relabelled_qemu(self.folder / "qemu-system-x86_64")
        self.known_hosts = self.folder / "known_hosts"
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {self.image.host_key}\n")

    def _make_disks(self) -> None:
        for name in ("root", "container"):
            base = self.image.folder / f"{name}.ext4"
            argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(base)]
            subprocess.run([*argv, str(self.folder / f"{name}.qcow2")], check=True)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self, initrd: Path | None = None, limit_s: float = 900, attempts: int = 3) -> float:
        """Boot to the first ssh login; returns the seconds that it took.

        QEMU 7.2 itself dies of a segmentation fault in one of some twenty boots under emulation with an IOMMU; such a
        boot is tried again, and any other end is an error at once.

        Args:
            initrd: another initramfs than the image's, such as one that the guest built; the disks are kept then.

        Raises:
            EmulatorError: QEMU was ended by a signal in every attempt.
            MachineError: the process ended, or no login within `limit_s` seconds.
        """
        begun = time.monotonic()
        for left in reversed(range(attempts)):
            try:
                self._launch(initrd)
                self._answers(limit_s)
                break
            except EmulatorError:
                if not left:
                    raise
                self.stop()
                if initrd is None:
                    self._make_disks()
        return time.monotonic() - begun

    def _launch(self, initrd: Path | None) -> None:
        with (self.folder / "qemu.log").open("wb") as log:
            self.process = subprocess.Popen(
                self._argv(initrd or self.image.initrd),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "QEMU_MODULE_DIR": f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}/qemu"},
            )

    def stop(self) -> None:
        """Pull the plug."""
        self.disconnect()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def power_off(self, limit_s: float = 120) -> None:
        """Let the guest shut itself down, so that its disks are written.

        Raises:
            MachineError: it still runs after `limit_s` seconds.
        """
        assert self.process is not None
        self.ssh("systemctl poweroff --no-block", check=False)
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired as late:
            raise MachineError(f"still running {limit_s:g} s after poweroff: {self.console()}") from late
        self.stop()

    def save(self, name: str) -> None:
        """Keep memory and disks under a name."""
        self._monitor(f"savevm {name}")

    def load(self, name: str) -> None:
        """Go back to a kept state; connections of before are dead."""
        self.disconnect()
        self._monitor(f"loadvm {name}")
        self._answers(300)

    def _answers(self, limit_s: float) -> None:
        def login() -> bool:
            return self.ssh("true", check=False, limit_s=15).returncode == 0

        try:
            until(login, "an ssh login", limit_s, every=0.3, unless=self._lives)
        except AssertionError as error:
            raise MachineError(f"{error}: {self.console()}") from error

    def _lives(self) -> None:
        status = None if self.process is None else self.process.poll()
        if status is not None and status < 0:
            raise EmulatorError(f"QEMU ended by signal {-status}: {self.console()}")
        if self.process is None or status is not None:
            raise MachineError(f"QEMU ended with {status}: {self.console()}")

    def console(self, lines: int = 15) -> str:
        """The end of what the guest and QEMU wrote."""
        parts = [self.folder / "console.log", self.folder / "qemu.log"]
        text = "\n".join(part.read_text(errors="replace") for part in parts if part.exists())
        return "\n".join(text.splitlines()[-lines:])

    def _monitor(self, command: str) -> str:
        """A command of QEMU's human monitor; what it answers is an error message or nothing."""
        self._lives()
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(120)
            link.connect(str(self.folder / "monitor"))
            with link.makefile("rw") as stream:
                stream.readline()
                answer = ""
                line = {"command-line": command}
                for name, arguments in (("qmp_capabilities", None), ("human-monitor-command", line)):
                    stream.write(json.dumps({"execute": name, **({"arguments": arguments} if arguments else {})}))
                    stream.flush()
                    reply: dict[str, object] = {}
                    while "return" not in reply and "error" not in reply:
                        reply = json.loads(stream.readline())
                    answer = str(reply.get("error") or reply["return"] or "")
        if command.split()[0] in ("savevm", "loadvm") and answer.strip():
            raise MachineError(f"{command}: {answer.strip()}")
        return answer

    def _argv(self, initrd: Path) -> list[str]:
        forward = f"hostfwd=tcp:127.0.0.1:{self.port}-{_GUEST_ADDRESS}:22"
        argv = [str(self.qemu), "-L", "/usr/share/qemu", "-L", "/usr/share/seabios"]
        argv += ["-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max", "-smp", "2"]
        argv += ["-m", str(self.memory_mib), "-no-reboot", "-nodefaults", "-no-user-config", "-display", "none"]
        argv += ["-serial", f"file:{self.folder}/console.log"]
        argv += ["-qmp", f"unix:{self.folder}/monitor,server=on,wait=off", "-device", "intel-iommu,intremap=on"]
        for name in ("root", "container"):
            argv += ["-drive", f"if=virtio,file={self.folder}/{name}.qcow2,format=qcow2,cache=unsafe"]
        # restrict: the guest reaches nothing, so whatever a role installs must be on it or come from the controller.
        argv += ["-netdev", f"user,id=net,restrict=on,{forward}", "-device", "virtio-net-pci,netdev=net,romfile="]
        argv += ["-device", "virtio-rng-pci"]
        for card in range(1, CARDS + 1):
            port = f"pcie-root-port,id=port{card},chassis={card},slot={card},bus=pcie.0,addr={15 + card}"
            argv += ["-device", port]
            argv += ["-device", f"bochs-display,bus=port{card},addr=0.0,multifunction=on,vgamem=16M"]
            argv += ["-device", f"ich9-intel-hda,bus=port{card},addr=0.1"]
        return [*argv, "-kernel", str(self.image.kernel), "-initrd", str(initrd), "-append", _APPEND]

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def ssh_options(self) -> list[str]:
        """Its own key, its pinned host key, nothing of the user's configuration."""
        options = ["-F", "/dev/null", "-i", str(self.image.key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
        options += ["-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "StrictHostKeyChecking=yes"]
        options += ["-o", "ConnectTimeout=10", "-o", "ControlMaster=auto", "-o", "ControlPersist=120"]
        return [*options, "-o", f"ControlPath={self.folder}/ssh"]

    def ssh(self, command: str, check: bool = True, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a shell command as root.

        Raises:
            MachineError: it failed and `check` is set.
        """
        argv = ["ssh", *self.ssh_options, "-p", str(self.port), "root@127.0.0.1", command]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(argv, 124, "", f"no answer within {limit_s:g} s")
        if check and done.returncode:
            self._lives()
            raise MachineError(f"`{command}` ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def out(self, command: str) -> str:
        """What a command printed, without the last newline."""
        return self.ssh(command).stdout.rstrip("\n")

    def fetch(self, path: str, target: Path) -> Path:
        """Copy a file of the guest to this machine."""
        argv = ["scp", "-q", *self.ssh_options, "-P", str(self.port), f"root@127.0.0.1:{path}", str(target)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
        return target

    def disconnect(self) -> None:
        """Close the shared ssh connections: after a jump in time they would hang."""
        for control in self.folder.glob("ssh*"):
            argv = ["ssh", "-F", "/dev/null", "-o", f"ControlPath={control}", "-O", "exit", "root@127.0.0.1"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
            control.unlink(missing_ok=True)
