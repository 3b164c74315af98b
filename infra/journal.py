"""What is written down before a create call, so that a run that died can go on without a second instance.

One JSON file a deployment, written whole and renamed into place. It holds no secret and nothing that `down` needs:
everything is found by its tags without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
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
        regions: where runs have made something since the deployment was last gone.
        damage: why the file cannot be read, or "". `down` needs nothing of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read()

    def _read(self) -> None:
        self.expires_at = ""
        self.launches: dict[str, LaunchEntry] = {}
        self.regions: list[str] = []
        self.damage = ""
        if not self._path.exists():
            return
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            if values["version"] != VERSION:
                raise ValueError(f"version {values['version']}, this program writes {VERSION}")
            self.expires_at = str(values["expires_at"])
            self.launches = {slot: LaunchEntry(**entry) for slot, entry in values["launches"].items()}
            self.regions = [str(region) for region in values.get("regions", ())]
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            self.damage = f"{self._path}: cannot be read ({exc}); remove it, everything is found by its tags"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs for this deployment away: each would make what the other has not yet told of.

        Raises:
            InfraError: another run is at work.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A file of its own, for the journal is replaced at every change. The system frees it when the process dies.
        path = self._path.with_suffix(".lock")
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # One that its last holder has removed since we opened it keeps nobody away.
                if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    raise BlockingIOError
            except BlockingIOError:
                raise InfraError(f"{path.stem}: another `up` or `down` is at work; wait for its end") from None
            try:
                self._read()
                yield
            finally:
                path.unlink(missing_ok=True)

    def note_regions(self, regions: Iterable[str]) -> None:
        """Something is about to be made there: `down` looks there too, whatever the spec says by then."""
        known = list(dict.fromkeys([*self.regions, *regions]))
        if known != self.regions:
            self.regions = known
            self._write()

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
        self.expires_at, self.launches, self.regions = "", {}, []
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        values = {
            "version": VERSION,
            "expires_at": self.expires_at,
            "regions": self.regions,
            "launches": {slot: asdict(entry) for slot, entry in self.launches.items()},
        }
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
