#!/usr/bin/python3
"""systemctl for a root without systemd: what the boot script asks of it, by the words of the unit files.

`enable --now A B` runs, for each service in order, its ExecStartPre as root and then its ExecStart in the background, as
its User, with its environment and its log file. Timers are noted. The root's own Python runs it.
"""

import grp
import os
import pwd
import shlex
import subprocess
import sys
from pathlib import Path

UNITS = Path("/etc/systemd/system")
NOTES = Path("/var/lib/stand-in")


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(key.strip(), []).append(value.strip())
    return found


def start(name: str) -> None:
    unit = settings(UNITS / name)
    user = unit.get("User", ["root"])[0]
    environment = dict(os.environ)
    for pair in unit.get("Environment", []):
        key, _, value = pair.partition("=")
        environment[key] = value
    for folder in unit.get("RuntimeDirectory", []):
        path = Path("/run") / folder
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, pwd.getpwnam(user).pw_uid, grp.getgrnam(user).gr_gid)
        path.chmod(int(unit["RuntimeDirectoryMode"][0], 8))
    for command in unit.get("ExecStartPre", []):
        assert command.startswith("+"), "as root"
        subprocess.run(shlex.split(command[1:]), check=True, env=environment)
    output = unit.get("StandardOutput", ["append:/var/log/" + name + ".log"])[0].removeprefix("append:")
    # A service does not inherit the provisioner's credentials; the agent above stands for the instance's role.
    service = {key: value for key, value in environment.items() if not key.startswith("AWS_")}
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
    if unit.get("AmbientCapabilities"):
        as_user += ["--inh-caps=+net_bind_service", "--ambient-caps=+net_bind_service"]
    with open(output, "ab") as sink:
        process = subprocess.Popen(
            [*as_user, *shlex.split(unit["ExecStart"][0].replace("%%", "%").replace("$$", "$"))],
            stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=service, cwd="/", start_new_session=True,
        )  # fmt: skip
    with (NOTES / "started").open("a") as notes:
        notes.write(f"{name} {process.pid}\n")


def main() -> None:
    NOTES.mkdir(exist_ok=True)
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if arguments[0] != "enable":
        return
    for name in arguments[1:]:
        if name.endswith(".service"):
            start(name)
        else:
            with (NOTES / "started").open("a") as notes:
                notes.write(f"{name} armed {settings(UNITS / name)['OnCalendar'][0]}\n")


main()
