"""What an instance does with itself: cloud-init user data, a boot script and systemd units. Pure.

User data holds no secret: whoever may describe the instance can read it. The agent (`infra.agent`) fetches secrets at
each start of the service, with the instance's own role. Order on the instance: the time to live is armed first, so that
an instance whose boot fails ends as well; then the package is installed; then the service starts and is kept running.
"""

from __future__ import annotations

import datetime
import json
import shlex
from dataclasses import dataclass

from infra.aws.names import CERTIFICATE, SECRET, log_group, parameter_path
from infra.spec import Machine, Spec

HOME = "/opt/foredraft"
CONFIG = "/etc/foredraft/node.json"
SCRIPT = "/usr/local/lib/foredraft/boot.sh"
UNITS = "/etc/systemd/system"
RUNTIME = "/run/foredraft"
STATE = "/var/lib/foredraft"
LOGS = "/var/log/foredraft"
RELAY_PORT = 8765
"""Where the relay listens, on the loopback; TLS stands in front of it."""
GRACE_S = 90
"""A spot notice gives two minutes; what is left of them is for the machine to stop."""
FAILED = "foredraft: boot failed"
"""What the end of the boot log says then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is known only when the instance is launched.

    Attributes:
        relay_region: where the parameters are.
        relay_address: the relay's fixed address.
        expires_at: ISO 8601, UTC.
    """

    region: str
    relay_region: str
    relay_address: str
    expires_at: str


def user_data(spec: Spec, machine: Machine, place: Place) -> str:
    """A #cloud-config document; JSON, which is YAML too."""
    files = {
        CONFIG: json.dumps(node_config(spec, machine, place), indent=1) + "\n",
        SCRIPT: boot_script(spec, machine, place),
        **{f"{UNITS}/{name}": text for name, text in units(spec, machine, place).items()},
        **({"/etc/foredraft/stunnel.conf": stunnel_config(spec)} if machine.role == "relay" else {}),
        "/etc/foredraft/cloudwatch.json": json.dumps(cloudwatch_config(spec, machine), indent=1) + "\n",
    }
    document = {
        "write_files": [
            {"path": path, "content": text, "permissions": "0755" if path == SCRIPT else "0644"}
            for path, text in files.items()
        ],
        "runcmd": [[SCRIPT]],
        "output": {"all": "| tee -a /var/log/cloud-init-output.log"},
    }
    return "#cloud-config\n" + json.dumps(document, indent=1) + "\n"


def node_config(spec: Spec, machine: Machine, place: Place) -> dict[str, object]:
    """What the agent reads: names of secrets, not secrets."""
    return {
        "slot": machine.slot,
        "role": machine.role,
        "parameter_region": place.relay_region,
        "secret_parameter": parameter_path(spec.name, SECRET),
        "published_certificate_parameter": parameter_path(spec.name, CERTIFICATE),
        "certificate_parameter": spec.access.certificate_parameter,
        "key_parameter": spec.access.key_parameter,
        "relay_name": spec.access.domain or place.relay_address,
        "hub_token_parameter": machine.hub_token_parameter,
        "model": machine.model,
    }


def command(spec: Spec, machine: Machine, place: Place) -> list[str]:
    """The service's own command."""
    secret = ["--secret-file", f"{RUNTIME}/secret"]
    if machine.role == "relay":
        listen = ["--host", "127.0.0.1", "--port", str(RELAY_PORT), "--grace-s", str(GRACE_S)]
        return [f"{HOME}/bin/foredraft-relay", *listen, *secret, *machine.arguments]
    relay = f"wss://{spec.access.domain or place.relay_address}:{spec.access.port}"
    model = f"{STATE}/model" if machine.model.startswith("s3://") else machine.model
    # A certificate that the relay did not make is checked like any other of the internet.
    authority = [] if spec.access.certificate_parameter else ["--ca-file", f"{RUNTIME}/relay.pem"]
    named = ["--name", machine.slot, "--region", place.region, "--model", model, "--grace-s", str(GRACE_S)]
    return [f"{HOME}/bin/foredraft-{machine.role}", "--relay", relay, *authority, *named, *secret, *machine.arguments]


def units(spec: Spec, machine: Machine, place: Place) -> dict[str, str]:
    """systemd units, by file name."""
    when = datetime.datetime.fromisoformat(place.expires_at).astimezone(datetime.UTC)
    made = {
        "foredraft.service": SERVICE.format(
            role=machine.role,
            home=HOME,
            runtime=RUNTIME,
            logs=LOGS,
            command=" ".join(_unit_word(word) for word in command(spec, machine, place)),
            stop_s=GRACE_S + 20,
        ),
        "foredraft-ttl.timer": TTL_TIMER.format(when=when.strftime("%Y-%m-%d %H:%M:%S UTC")),
        "foredraft-ttl.service": TTL_SERVICE,
    }
    if machine.role == "relay":
        made["foredraft-tls.service"] = TLS_SERVICE
    elif not spec.access.certificate_parameter:
        made["foredraft-certificate.service"] = CERTIFICATE_SERVICE.format(home=HOME)
    if machine.market == "spot":
        made["foredraft-spot.service"] = SPOT_SERVICE.format(home=HOME)
    return made


def boot_script(spec: Spec, machine: Machine, place: Place) -> str:
    """Runs once, as root. Every step may be repeated."""
    extras = "infra" if machine.role == "relay" else "node,infra"
    pip = [f"{HOME}/bin/python", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if spec.package.index_url:
        pip += ["--index-url", spec.package.index_url]
    install = shlex.join(pip)
    name, _, version = spec.package.requirement.partition("==")
    if spec.package.wheel:
        bucket, _, key = spec.package.wheel.removeprefix("s3://").partition("/")
        wheel = f"/tmp/{key.rpartition('/')[2]}"
        fetch = f"import boto3; boto3.client('s3').download_file({bucket!r}, {key!r}, {wheel!r})"
        package = (
            f"{install} boto3\n{HOME}/bin/python -c {shlex.quote(fetch)}\n{install} {shlex.quote(f'{wheel}[{extras}]')}"
        )
    else:
        package = f"{install} {shlex.quote(f'{name}[{extras}]' + (f'=={version}' if version else ''))}"
    services = [name for name in units(spec, machine, place) if not name.startswith("foredraft-ttl")]
    return BOOT.format(
        failed=FAILED,
        home=HOME,
        logs=LOGS,
        state=STATE,
        region=place.region,
        packages="python3-venv" + (" stunnel4 openssl" if machine.role == "relay" else ""),
        package=package,
        services=" ".join(services),
        slot=machine.slot,
    )


def stunnel_config(spec: Spec) -> str:
    """TLS in front of the relay; small frames must not wait for bigger ones."""
    return STUNNEL.format(port=spec.access.port, relay_port=RELAY_PORT)


def cloudwatch_config(spec: Spec, machine: Machine) -> dict[str, object]:
    """Which files Amazon's agent sends where."""
    group = log_group(spec.name)
    files = [
        {"file_path": f"{LOGS}/node.log", "log_group_name": group, "log_stream_name": machine.slot},
        {
            "file_path": "/var/log/cloud-init-output.log",
            "log_group_name": group,
            "log_stream_name": f"{machine.slot}/boot",
        },
    ]
    return {"logs": {"logs_collected": {"files": {"collect_list": files}}}}


def _unit_word(word: str) -> str:
    """One word of ExecStart: quoted where needed, with systemd's own signs made plain."""
    plain = word.replace("%", "%%").replace("$", "$$")
    return (
        plain
        if plain and not set(plain) & set(" \t\"'\\;")
        else '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
    )


SERVICE = """\
[Unit]
Description=Foredraft {role}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
User=foredraft
Group=foredraft
RuntimeDirectory=foredraft
RuntimeDirectoryMode=0750
StateDirectory=foredraft
# The agent is root: it alone reads the instance's role and the certificate's key.
ExecStartPre=+{home}/bin/python -m infra.agent prepare
EnvironmentFile=-{runtime}/environment
Environment=HF_HOME=/var/lib/foredraft/hub
ExecStart={command}
Restart=always
RestartSec=5
TimeoutStartSec=infinity
TimeoutStopSec={stop_s}
StandardOutput=append:{logs}/node.log
StandardError=append:{logs}/node.log
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes

[Install]
WantedBy=multi-user.target
"""

TLS_SERVICE = """\
[Unit]
Description=TLS in front of the Foredraft relay
After=foredraft.service
Wants=foredraft.service

[Service]
User=stunnel4
Group=stunnel4
ExecStart=/usr/bin/stunnel4 /etc/foredraft/stunnel.conf
Restart=always
RestartSec=2
AmbientCapabilities=CAP_NET_BIND_SERVICE
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""

CERTIFICATE_SERVICE = """\
[Unit]
Description=Follow the certificate of the Foredraft relay
After=foredraft.service

[Service]
ExecStart={home}/bin/python -m infra.agent follow-relay
Restart=always
RestartSec=5

[Install]
WantedBy=multi-user.target
"""

SPOT_SERVICE = """\
[Unit]
Description=Drain the Foredraft node on a spot interruption notice
After=foredraft.service

[Service]
ExecStart={home}/bin/python -m infra.agent watch-spot -- systemctl stop foredraft.service
Restart=on-failure
RestartSec=5

[Install]
WantedBy=multi-user.target
"""

TTL_TIMER = """\
[Unit]
Description=The end of this instance's time to live

[Timer]
OnCalendar={when}
AccuracySec=1s
Persistent=yes
Unit=foredraft-ttl.service

[Install]
WantedBy=timers.target
"""

TTL_SERVICE = """\
[Unit]
Description=Power off, which ends this instance

[Service]
Type=oneshot
ExecStart=/usr/bin/systemctl poweroff
"""

STUNNEL = """\
foreground = yes
pid =
syslog = no
socket = l:TCP_NODELAY=1
socket = r:TCP_NODELAY=1
sslVersionMin = TLSv1.2
TIMEOUTclose = 0

[relay]
accept = {port}
connect = 127.0.0.1:{relay_port}
cert = /etc/foredraft/tls/relay.pem
key = /etc/foredraft/tls/relay.key
"""

BOOT = """\
#!/bin/bash
# Written by foredraft-infra for {slot}; its output is in /var/log/cloud-init-output.log and on the console.
set -euo pipefail
trap 'echo "{failed} in line $LINENO (exit $?)"' ERR
export DEBIAN_FRONTEND=noninteractive PIP_ROOT_USER_ACTION=ignore AWS_DEFAULT_REGION={region}

systemctl daemon-reload
systemctl enable --now foredraft-ttl.timer

# At a first boot the machine's own upgrades may hold apt's locks, and a mirror may be in the middle of an update.
again() {{ for pause in 5 10 20 40 60 0; do "$@" && return; sleep "$pause"; done; return 1; }}
again apt-get update -qq
again apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends {packages}
id foredraft >/dev/null 2>&1 || useradd --system --home-dir {state} --shell /usr/sbin/nologin foredraft
install -d -m 0755 {logs}
install -d -m 0755 -o foredraft -g foredraft {state}

test -x {home}/bin/python || python3 -m venv {home}
{package}

# Logs are worth much, but not the node: without the agent they stay on the instance.
if ! test -x /opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl; then
    from=https://amazoncloudwatch-agent-{region}.s3.{region}.amazonaws.com/ubuntu/$(dpkg --print-architecture)
    curl -fsS -m 120 -o /tmp/cloudwatch.deb "$from/latest/amazon-cloudwatch-agent.deb" \\
        && dpkg -i /tmp/cloudwatch.deb || echo "foredraft: no CloudWatch agent, logs stay here"
fi
if test -x /opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl; then
    /opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl -a fetch-config -m ec2 -s \\
        -c file:/etc/foredraft/cloudwatch.json || echo "foredraft: the CloudWatch agent does not start"
fi

systemctl enable --now {services}
echo "foredraft: boot finished"
"""
