"""What the page looks at, and where it is served."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from drafthouse.config import Settings

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
TOKEN = "DRAFTHOUSE_DASH_TOKEN"


class DashSettings(Settings):
    """Sources and address of the page."""

    inventory: Path | None = Field(None, description="inventory folder: nodes, jobs, the fleet's store")
    runs: tuple[Path, ...] = Field((), description="run folders, as `drafthouse demo --out` makes them")
    stores: tuple[str, ...] = Field((), description="further stores with runs and drafters")
    servers: dict[Name, str] = Field(
        default_factory=dict, description="name -> base URL of a server whose /metrics is read, beside the jobs'"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8765, ge=0, le=65535, description="0: any free one")
    url: str | None = Field(
        None, pattern=r"^https?://[A-Za-z0-9.:\[\]-]+/?$", description="where a reverse proxy shows the page"
    )
    refresh_s: float = Field(2.0, ge=0.2, description="seconds between looks at stores and servers")
    probe_s: float = Field(30.0, ge=0, description="seconds between probes of the nodes over ssh; 0: never")
    history_s: float = Field(3600.0, gt=0, description="how far back rates and latencies are remembered")
    remember: Path | None = Field(None, description="file for the last known truth; none: forgotten at the end")

    @model_validator(mode="after")
    def _looks_at_something(self) -> Self:
        if not (self.inventory or self.runs or self.stores or self.servers):
            raise ValueError("nothing to look at: give an inventory, a run, a store or a server")
        return self

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the page."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
