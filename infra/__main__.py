"""`foredraft-infra`: plan, up, status, ssh, logs, cost, down, each with the same spec."""

from __future__ import annotations

import argparse
import datetime
import io
import logging
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra import placement, report
from infra.apply import Applier, Done
from infra.aws.client import Clients
from infra.aws.provider import AwsProvider
from infra.boot import Place, user_data
from infra.errors import InfraError, NotReady, ProviderError, SpecError
from infra.health import probe
from infra.journal import Journal
from infra.plan import Launch, plan_up
from infra.predict import forecast
from infra.readiness import Readiness, tail
from infra.spec import Spec
from infra.state import GLOBAL, Observed
from infra.waiting import SystemClock, Waiter

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
COMMAND_S = 600.0
FOLLOW_S = 3.0


@dataclass(frozen=True, slots=True)
class Session:
    """One run of the command."""

    spec: Spec
    provider: AwsProvider
    applier: Applier
    waiter: Waiter
    measured: dict[frozenset[str], float]

    @property
    def regions(self) -> tuple[str, ...]:
        return (GLOBAL, *self.spec.regions)


def say(line: str) -> None:
    """Tell the user. Nobody may be there any more: Ctrl-C ends `| tee` as well, and a roll-back must go on."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = io.StringIO()


def open_session(given: argparse.Namespace) -> Session:
    """Read the spec and make what the commands need."""
    spec = Spec.load(given.spec)
    clients = Clients(profile=given.profile)
    provider = AwsProvider(clients, deployment=spec.name, extra_tags=spec.tags)
    clock, rng = SystemClock(), random.Random()

    def data(launch: Launch, relay_region: str, relay_address: str, expires_at: str) -> str:
        place = Place(
            region=launch.region, relay_region=relay_region, relay_address=relay_address, expires_at=expires_at
        )
        return user_data(spec, launch.machine, place)

    journal = Journal(given.state_dir / f"{spec.name}.json")
    applier = Applier(provider, journal=journal, clock=clock, user_data=data, say=say, rng=rng)
    return Session(spec, provider, applier, Waiter(clock, rng), dict(getattr(given, "round_trip", None) or ()))


def readiness(session: Session) -> Readiness:
    return Readiness(
        session.provider,
        session.spec,
        waiter=session.waiter,
        probe=probe,
        say=say,
        started_ms=int(time.time() * 1000) - int(session.spec.ready_timeout_s * 1000),
    )


def spot_prices(session: Session, relay_region: str) -> dict[tuple[str, str], float]:
    """Current prices of the spot machines; without credentials none, and the shipped ones stand."""
    found = {}
    for machine in session.spec.machines:
        if machine.market != "spot":
            continue
        region = relay_region if machine.role == "relay" else machine.regions[0]
        for kind, price in session.provider.spot_usd_per_hour(region, machine.instance_types).items():
            found[region, kind] = price
    return found


def show_plan(session: Session, *, offline: bool) -> str:
    """Print placement, forecast and cost; the best region for the relay."""
    spec = session.spec
    found = placement.candidates(spec, session.measured)
    region = found[0].region
    spot: dict[tuple[str, str], float] = {}
    if not offline:
        try:
            spot = spot_prices(session, region)
        except ProviderError as exc:
            say(f"spot prices not known, on-demand prices instead: {exc}")
    lines = placement.costs(spec, region, spot)
    told = report.placement_lines(found, measured=bool(session.measured))
    told += report.forecast_lines(spec, region, forecast(spec.prediction, found[0].path_ms), lines)
    told += report.cost_lines(lines)
    for line in told:
        say(line)
    return region


def command_plan(given: argparse.Namespace) -> int:
    session = open_session(given)
    region = show_plan(session, offline=given.offline)
    if given.offline:
        observed = Observed()
        say("offline: as if nothing existed")
    else:
        observed = session.provider.observe(session.regions)
    for line in report.plan_lines(plan_up(session.spec, region, observed)):
        say(line)
    placement.check_budget(session.spec, placement.costs(session.spec, region))
    return EXIT_OK


def command_up(given: argparse.Namespace) -> int:
    session = open_session(given)
    spec = session.spec
    best = placement.candidates(spec, session.measured)[0].region
    cost = placement.check_budget(spec, placement.costs(spec, best))
    session.provider.check_access(spec)
    if given.dry_run:
        session.applier.dry_run(spec, best)
        return EXIT_OK
    say(f"{spec.name}: at most {cost:.2f} USD in {spec.ttl_hours:g} h, then the instances end by themselves")
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=spec.ttl_hours)
    ready = readiness(session)

    def wait(done: Done) -> None:
        ready.wait(done.plan, done.relay_address, done.instance_ids)

    done = session.applier.up(spec, best, expires_at=expires.isoformat(timespec="seconds"), keep=given.keep, ready=wait)
    access = spec.access
    say(f"ready: wss://{access.domain or done.relay_address}:{access.port}")
    certificate = given.state_dir / f"{spec.name}.pem"
    if not access.certificate_parameter:
        write_private(certificate, session.provider.fetch_certificate(done.relay_region, spec))
    secret = given.state_dir / f"{spec.name}.secret"
    write_private(secret, session.provider.fetch_secret(done.relay_region))
    authority = "" if access.certificate_parameter else f" --ca-file {certificate}"
    say(
        f"ask: foredraft-client --relay wss://{access.domain or done.relay_address}:{access.port}{authority} "
        f"--secret-file {secret} 'Why is the sky blue?'"
    )
    return EXIT_OK


def command_status(given: argparse.Namespace) -> int:
    session = open_session(given)
    observed = session.provider.observe(session.regions)
    addresses = observed.addresses()
    ready, relay = None, ""
    if addresses and observed.alive("relay"):
        look = readiness(session)
        relay = f"{addresses[0].detail}: {look.look(addresses[0].region, addresses[0].detail).told}"
        ready = look.ready
    for line in report.status_lines(observed, ready, relay):
        say(line)
    return EXIT_OK if ready is not None and not {m.slot for m in session.spec.machines} - ready else EXIT_FAILURE


def command_cost(given: argparse.Namespace) -> int:
    session = open_session(given)
    observed = session.provider.observe(session.regions)
    relay = next((r.region for r in observed.alive("relay")), session.spec.relay.regions[0])
    now = datetime.datetime.now(datetime.UTC)
    for line in report.spent_lines(session.spec, observed, now, spot_prices(session, relay)):
        say(line)
    return EXIT_OK


def find_instance(session: Session, slot: str) -> tuple[str, str]:
    """(region, id) of the instance in a slot."""
    alive = session.provider.observe(session.spec.regions).alive(slot)
    if not alive:
        known = ", ".join(m.slot for m in session.spec.machines)
        raise InfraError(f"{slot}: no such instance runs; the spec has {known}")
    return alive[0].region, alive[0].id


def region_of_logs(session: Session, slot: str) -> str:
    """Logs outlive their instance, and are wanted most when it has gone."""
    machine = next((m for m in session.spec.machines if m.slot == slot), None)
    if machine is None or len(machine.regions) > 1:
        return find_instance(session, slot)[0]
    return machine.regions[0]


def command_ssh(given: argparse.Namespace) -> int:
    """A shell, or one command, through Systems Manager: no port is open for it and there is no key to lose."""
    session = open_session(given)
    region, instance_id = find_instance(session, given.slot)
    if not given.run:
        command = session.provider.shell_command(region, instance_id)
        for program in (command[0], "session-manager-plugin"):
            if shutil.which(program) is None:
                raise InfraError(
                    f"{program}: not installed; it carries the shell. Single commands need nothing: -- COMMAND"
                )
        os.execvp(command[0], command)
    command_id = session.provider.run_command(region, instance_id, " ".join(given.run))

    def output() -> tuple[str, str, int] | None:
        try:
            return session.provider.command_output(region, instance_id, command_id)
        except ProviderError as exc:
            if "InvocationDoesNotExist" not in exc.code:
                raise
            return None

    answer = session.waiter.until(output, deadline_s=COMMAND_S)
    if answer is None:
        raise InfraError(f"{given.slot}: the command runs on after {COMMAND_S:g} s (command {command_id} in {region})")
    sys.stdout.write(answer[0])
    sys.stderr.write(answer[1])
    return answer[2]


def command_logs(given: argparse.Namespace) -> int:
    session = open_session(given)
    if given.boot:
        region, instance_id = find_instance(session, given.slot)
        say(tail(session.provider.boot_log(region, instance_id), given.lines))
        return EXIT_OK
    region = region_of_logs(session, given.slot)
    since_ms = int((time.time() - 60 * given.minutes) * 1000)
    while True:
        for line in session.provider.log_lines(region, given.slot, since_ms=since_ms):
            say(line.text)
            since_ms = max(since_ms, line.at_ms + 1)
        if not given.follow:
            return EXIT_OK
        time.sleep(FOLLOW_S)


def command_down(given: argparse.Namespace) -> int:
    session = open_session(given)
    regions = session.provider.all_regions() if given.all_regions else session.spec.regions
    count = session.applier.down(regions)
    for suffix in ("pem", "secret"):
        (given.state_dir / f"{session.spec.name}.{suffix}").unlink(missing_ok=True)
    say(f"removed {count}; nothing is left" if count else "nothing to remove")
    return EXIT_OK


def write_private(path: Path, text: str) -> None:
    """For the user alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def home_expanded(path: Path) -> Path:
    """With the user's home in place of ~."""
    try:
        return path.expanduser()
    except RuntimeError as exc:
        raise InfraError(f"{path}: {exc}; give --state-dir") from exc


def round_trip(text: str) -> tuple[frozenset[str], float]:
    """REGION:REGION=MS."""
    match = re.fullmatch(r"([a-z0-9-]+):([a-z0-9-]+)=(\d+(?:\.\d+)?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be REGION:REGION=MILLISECONDS, got {text!r}")
    return frozenset((match[1], match[2])), float(match[3])


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="foredraft-infra",
        description="A relay, verify nodes and draft nodes in AWS, from one TOML spec. See docs/aws.md.",
    )
    top.add_argument("--profile", help="AWS profile; else the environment decides, as for the aws command")
    top.add_argument(
        "--state-dir",
        type=Path,
        default=Path("~/.foredraft"),
        help="where runs are written down (default: %(default)s)",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("spec", type=Path, help="the TOML file")
        made.set_defaults(run_command=run)
        return made

    plan = add("plan", command_plan, "show where the relay would go, what it would cost, and what `up` would do")
    plan.add_argument("--offline", action="store_true", help="ask nobody; as if nothing existed")
    up = add("up", command_up, "make everything, wait until the nodes are ready")
    up.add_argument(
        "--dry-run", action="store_true", help="ask EC2 whether each launch would be allowed; change nothing"
    )
    up.add_argument(
        "--keep", action="store_true", help="on failure keep what was made; a second `up` goes on from there"
    )
    for command in (plan, up):
        command.add_argument(
            "--round-trip",
            type=round_trip,
            action="append",
            metavar="A:B=MS",
            help="a measured round trip; may be repeated",
        )
    add("status", command_status, "show what exists and who is ready; exit code 1 unless all are")
    add("cost", command_cost, "show what it costs per hour, so far, and at its end")
    ssh = add("ssh", command_ssh, "a shell on a machine, or one command, through Systems Manager")
    ssh.add_argument("slot", help="relay, verify-0, ...")
    ssh.add_argument("run", nargs="*", metavar="-- COMMAND", help="run this instead of a shell")
    logs = add("logs", command_logs, "show a machine's log")
    logs.add_argument("slot", help="relay, verify-0, ...")
    logs.add_argument("--boot", action="store_true", help="the end of the boot log, from the instance's console")
    logs.add_argument("--lines", type=int, default=80, help="of the boot log (default: %(default)s)")
    logs.add_argument("--minutes", type=float, default=15, help="how far back (default: %(default)s)")
    logs.add_argument("--follow", action="store_true", help="go on as lines come")
    down = add("down", command_down, "remove everything, found by its tags; exit code 1 if anything is left")
    down.add_argument(
        "--all-regions", action="store_true", help="look in every region of the account, not only the spec's"
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = parser().parse_args(argv)
    # A plain kill rolls back as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        given.state_dir = home_expanded(given.state_dir)
        code: int = given.run_command(given)
        return code
    except NotReady as exc:
        sys.stderr.write(f"foredraft-infra: {exc}\n")
        for slot, log in exc.boot_logs.items():
            sys.stderr.write(f"--- end of the boot log of {slot}\n{log}\n")
        return EXIT_FAILURE
    except SpecError as exc:
        sys.stderr.write(f"foredraft-infra: {exc}\n")
        return EXIT_USAGE
    except (InfraError, OSError) as exc:
        # The latter of the state folder: read-only, full.
        sys.stderr.write(f"foredraft-infra: {exc}\n")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        sys.stderr.write("foredraft-infra: interrupted; `up` goes on, `down` removes what is there\n")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
