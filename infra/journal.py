"""What is written down before a create call, so that a run that died can go on without a second instance.

One JSON file a deployment, written whole and renamed into place. It holds no secret and nothing that `down` needs:
everything is found by its tags without it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.errors import InfraError

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEntry:
    """One create call: about to be made while `instance_id` is "", made otherwise."""

    token: str
    region: str
    zone: str
    instance_type: str
    instance_id: str = ""


class Journal:
    """The file of one deployment.

    Attributes:
        expires_at: the time to live's end, part of the user data and so of what a token stands for.
        launches: by slot.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.expires_at = ""
        self.launches: dict[str, LaunchEntry] = {}
        if path.exists():
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
                if values["version"] != VERSION:
                    raise InfraError(f"{path}: version {values['version']}, this program writes {VERSION}; remove it")
                self.expires_at = str(values["expires_at"])
                self.launches = {slot: LaunchEntry(**entry) for slot, entry in values["launches"].items()}
            except (ValueError, KeyError, TypeError) as exc:
                raise InfraError(f"{path}: cannot be read ({exc}); remove it, everything is found by its tags") from exc

    def set_expiry(self, expires_at: str) -> None:
        self.expires_at = expires_at
        self._write()

    def about_to_launch(self, slot: str, entry: LaunchEntry) -> None:
        """To be called before the create call."""
        self.launches[slot] = entry
        self._write()

    def launched(self, slot: str, instance_id: str) -> None:
        """To be called before anything else is asked about the instance."""
        known = asdict(self.launches[slot])
        self.launches[slot] = LaunchEntry(**{**known, "instance_id": instance_id})
        self._write()

    def refused(self, slot: str) -> None:
        """The create call was answered: nothing came of it."""
        del self.launches[slot]
        self._write()

    def clear(self) -> None:
        """The deployment is gone."""
        self.expires_at, self.launches = "", {}
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        values = {
            "version": VERSION,
            "expires_at": self.expires_at,
            "launches": {slot: asdict(entry) for slot, entry in self.launches.items()},
        }
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
