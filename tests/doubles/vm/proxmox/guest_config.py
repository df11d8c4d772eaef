"""Configuration files of guests as Proxmox VE keeps them below /etc/pve: read, changed, written back in its order.

Comments move to the top, keys are sorted, raw `lxc.` keys come last, then `[pve:pending]` and the snapshots: what makes
every tool that edits these files as text fail sooner or later.
"""

import re

PENDING = "pve:pending"


class GuestConfig:
    """One guest's file.

    Attributes:
        description: comment lines.
        main: key -> value, without raw keys.
        raw: (key, value) of `lxc.` lines, in their order.
        pending: key -> value that wait for the next start; `delete` names keys that go away then.
        rest: the text of snapshot sections.
    """

    def __init__(self, text):
        self.description, self.main, self.raw, self.pending, self.rest = [], {}, [], {}, ""
        section = ""
        for line in text.splitlines():
            header = re.match(r"\[(.+)\]\s*$", line)
            if header:
                section = header[1]
            if section and section.lower() not in (PENDING, "pending"):
                self.rest += line + "\n"
                continue
            if header or not line.strip():
                continue
            if line.startswith("#"):
                self.description.append(line)
                continue
            key, _, value = line.partition(":")
            key, value = key.strip(), value.strip()
            if section:
                self.pending[key] = value
            elif key.startswith("lxc."):
                self.raw.append((key, value))
            else:
                self.main[key] = value

    @property
    def leaving(self):
        """Keys that a restart takes away."""
        return [key for key in self.pending.get("delete", "").split(",") if key]

    def coming(self):
        """The main section as it is after the next start."""
        after = {key: value for key, value in self.main.items() if key not in self.leaving}
        after.update({key: value for key, value in self.pending.items() if key != "delete"})
        return after

    def set(self, key, value, later):
        """Change a key now, or (`later`) at the next start."""
        kept = [name for name in self.leaving if name != key]
        self.pending.pop("delete", None)
        if kept:
            self.pending["delete"] = ",".join(kept)
        if later and self.main.get(key) != value:
            self.pending[key] = value
        else:
            self.pending.pop(key, None)
            if not later:
                self.main[key] = value

    def delete(self, key, later):
        self.pending.pop(key, None)
        if not later:
            self.main.pop(key, None)
        elif key in self.main and key not in self.leaving:
            self.pending["delete"] = ",".join([*self.leaving, key])

    def settle(self):
        """What waited takes effect: the guest starts."""
        self.main, self.pending = self.coming(), {}

    def text(self):
        lines = [*self.description, *(f"{key}: {self.main[key]}" for key in sorted(self.main))]
        lines += [f"{key}: {value}" for key, value in self.raw]
        if self.pending:
            lines += ["", f"[{PENDING}]", *(f"{key}: {self.pending[key]}" for key in sorted(self.pending))]
        return "\n".join(lines) + "\n" + (f"\n{self.rest}" if self.rest else "")
