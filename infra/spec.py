"""One TOML file says what there is to be: `Spec.load(path)`. Pure, but for reading the file."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.errors import SpecError
from infra.table import Table

REGION = r"[a-z]{2}(-[a-z]+)+-\d"
TYPE = r"[a-z0-9-]+\.[a-z0-9]+"
NAME = r"[a-z][a-z0-9-]{1,29}"
PARAMETER = r"/[A-Za-z0-9_.\-/]{1,500}"
MARKETS = ("on-demand", "spot")
MAX_NODES = 64
MIN_NODE_DISK_GIB = 30
# What the boot script passes to the node itself.
OWN_ARGUMENTS = {
    "--relay",
    "--name",
    "--region",
    "--model",
    "--secret-file",
    "--ca-file",
    "--config",
    "--host",
    "--port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Which machine image: looked up in each region by owner and name; {arch} is the type's architecture (amd64,
    arm64).
    """

    owner: str
    name: str


RELAY_IMAGE = Image(owner="099720109477", name="ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-{arch}-server-*")
NODE_IMAGE = Image(owner="amazon", name="Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one instance is to be; relay and nodes alike.

    Attributes:
        slot: its name, unique in the deployment: "relay", "verify-0".
        regions: one for a node; the candidates for the relay.
        arguments: further arguments of the command it runs.
        shared: what all machines of the deployment are made from, as one text.
    """

    slot: str
    role: str
    regions: tuple[str, ...]
    zones: tuple[str, ...]
    instance_types: tuple[str, ...]
    market: str
    max_usd_per_hour: float | None
    disk_gib: int
    image: Image
    model: str
    arguments: tuple[str, ...]
    hub_token_parameter: str
    shared: str = ""

    def fingerprint(self) -> str:
        """Changes with whatever would need another instance."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("slot", "regions")}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Where instances get the released package: an index (`requirement`) or a wheel in S3."""

    requirement: str
    wheel: str
    index_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayAccess:
    """How the relay is reached.

    Attributes:
        domain: the DNS name its certificate is for; "" for its fixed address.
        certificate_parameter, key_parameter: PEM texts in the parameter store; "" when the relay makes its own.
    """

    port: int
    domain: str
    allow_from: tuple[str, ...]
    certificate_parameter: str
    key_parameter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator is told; measure it with the benchmarks."""

    verify_ms: float
    draft_ms: float
    acceptance: float
    growth: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The whole deployment."""

    name: str
    ttl_hours: float
    budget_usd: float
    own_network: bool
    ready_timeout_s: float
    tags: Mapping[str, str]
    package: Package
    access: RelayAccess
    relay: Machine
    nodes: tuple[Machine, ...]
    prediction: Prediction
    prices: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[str, ...]:
        """Every region in which this deployment may have something."""
        names = [*self.relay.regions, *(region for node in self.nodes for region in node.regions)]
        return tuple(dict.fromkeys(names))

    @property
    def machines(self) -> tuple[Machine, ...]:
        return (self.relay, *self.nodes)

    @classmethod
    def load(cls, path: Path) -> Spec:
        """Read and check a file.

        Raises:
            SpecError: with the field, its value and the limit.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise SpecError(f"{path}: {exc.strerror}") from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise SpecError(f"{path}: not TOML: {exc}") from exc
        return parse(values)


def parse(values: Mapping[str, Any]) -> Spec:
    """The spec in a parsed TOML document; raises `SpecError`."""
    top = Table(values, "")
    deployment = Table(top.raw("deployment", {}), "deployment")
    relay_table = Table(top.raw("relay", {}), "relay")
    node_tables = top.raw("node", [])
    if not isinstance(node_tables, list) or not node_tables:
        raise SpecError("node: must be one or more [[node]] tables")
    package = _package(Table(top.raw("package", {}), "package"))
    prediction = _prediction(Table(top.raw("predict", {}), "predict"))
    prices = _prices(top.raw("prices", {}))
    top.close()
    access = _access(relay_table)
    shared = f"{package} {access.port} {access.domain} {access.certificate_parameter}"
    relay = replace(_machine(relay_table, "relay", 0), shared=shared)
    relay_table.close()
    nodes = tuple(replace(node, shared=shared) for node in _nodes(node_tables))
    spec = Spec(
        name=deployment.text("name", pattern=NAME, wanted="2 to 30 of a-z, 0-9 and -, a letter first"),
        ttl_hours=deployment.number("ttl_hours", 0.25, 168),
        budget_usd=deployment.number("budget_usd", 0.01, 100_000),
        own_network=deployment.choice("network", ("default", "own"), "default") == "own",
        ready_timeout_s=60 * deployment.number("ready_timeout_minutes", 1, 120, 20),
        tags=_tags(deployment),
        package=package,
        access=access,
        relay=relay,
        nodes=nodes,
        prediction=prediction,
        prices=prices,
    )
    deployment.close()
    return spec


def _nodes(tables: list[Any]) -> tuple[Machine, ...]:
    counts = {"draft": 0, "verify": 0}
    nodes = []
    for index, values in enumerate(tables):
        table = Table(values, f"node[{index}]")
        role = table.choice("role", ("draft", "verify"))
        for _ in range(table.whole("count", 1, MAX_NODES, 1)):
            nodes.append(_machine(table, role, counts[role]))
            counts[role] += 1
        table.close()
    for role, count in counts.items():
        if not count:
            raise SpecError(f'node: there must be one with role = "{role}", got none')
    if len(nodes) > MAX_NODES:
        raise SpecError(f"node: {len(nodes)} nodes in all, at most {MAX_NODES}")
    return tuple(nodes)


def _machine(table: Table, role: str, number: int) -> Machine:
    is_relay = role == "relay"
    told = "regions such as us-east-2"
    regions = (
        table.texts("regions", least=1, pattern=REGION, wanted=told)
        if is_relay
        else (table.text("region", pattern=REGION, wanted="a region such as us-east-2"),)
    )
    zones = () if is_relay else table.texts("zones", (), pattern=REGION + "[a-z]", wanted="zones such as us-east-2a")
    for zone in zones:
        if zone[:-1] != regions[0]:
            raise SpecError(f"{table.name('zones')}: {zone} is not in {regions[0]}")
    arguments = table.raw("arguments", [])
    if not isinstance(arguments, list) or not all(isinstance(a, str) and a and a.isprintable() for a in arguments):
        raise SpecError(f"{table.name('arguments')}: must be a list of texts in one line each, got {arguments!r}")
    for argument in arguments:
        if argument.partition("=")[0] in OWN_ARGUMENTS:
            raise SpecError(f"{table.name('arguments')}: {argument} is set by the boot script, leave it out")
    price = table.raw("max_usd_per_hour")
    image = NODE_IMAGE if not is_relay else RELAY_IMAGE
    return Machine(
        slot="relay" if is_relay else f"{role}-{number}",
        role=role,
        regions=regions,
        zones=zones,
        instance_types=table.texts(
            "instance_types",
            ("t3.micro",) if is_relay else None,
            least=1,
            pattern=TYPE,
            wanted="types such as g6.xlarge",
        ),
        market=table.choice("market", MARKETS, "on-demand"),
        max_usd_per_hour=None if price is None else table.number("max_usd_per_hour", 0.001, 1000),
        disk_gib=table.whole("disk_gib", 8 if is_relay else MIN_NODE_DISK_GIB, 16_384, 8 if is_relay else 100),
        image=Image(
            owner=table.text("image_owner", image.owner, wanted="an account id or alias"),
            name=table.text("image_name", image.name, wanted="a name, * for any text"),
        ),
        model="" if is_relay else table.text("model", pattern=r"\S+", wanted="a hub id or s3://bucket/prefix"),
        arguments=tuple(arguments),
        hub_token_parameter=(
            "" if is_relay else table.text("hub_token_parameter", "", pattern=PARAMETER, wanted="a parameter's path")
        ),
    )


def _access(table: Table) -> RelayAccess:
    networks = table.texts("allow_from", ("0.0.0.0/0",), least=1, wanted="networks such as 203.0.113.0/24")
    access = RelayAccess(
        port=table.whole("port", 1, 65_535, 443),
        domain=table.text("domain", "", pattern=r"[a-z0-9-]+(\.[a-z0-9-]+)+", wanted="a DNS name"),
        allow_from=tuple(_network(table, text) for text in networks),
        certificate_parameter=table.text("certificate_parameter", "", pattern=PARAMETER, wanted="a parameter's path"),
        key_parameter=table.text("key_parameter", "", pattern=PARAMETER, wanted="a parameter's path"),
    )
    if bool(access.certificate_parameter) != bool(access.key_parameter):
        raise SpecError(f"{table.name('certificate_parameter')}: give it together with key_parameter, or neither")
    if access.certificate_parameter and not access.domain:
        raise SpecError(
            f"{table.name('domain')}: must be given with certificate_parameter: what is the certificate for?"
        )
    return access


def _network(table: Table, text: str) -> str:
    """As AWS has it: a single address is a network of /32."""
    try:
        return str(ipaddress.IPv4Network(text))
    except ValueError as exc:
        raise SpecError(f"{table.name('allow_from')}: {text!r} is not an IPv4 network: {exc}") from None


def _package(table: Table) -> Package:
    package = Package(
        requirement=table.text("requirement", "", pattern=r"foredraft(==\S+)?", wanted="foredraft==VERSION"),
        wheel=table.text("wheel", "", pattern=r"s3://[^/]+/\S+\.whl", wanted="s3://bucket/key.whl"),
        index_url=table.text("index_url", "", pattern=r"https?://\S+", wanted="an http(s) address"),
    )
    table.close()
    if bool(package.requirement) == bool(package.wheel):
        raise SpecError("package: give either requirement or wheel, got " + ("both" if package.wheel else "neither"))
    if "@" in package.index_url:
        raise SpecError("package.index_url: must not hold a password: it is part of the user data")
    return package


def _prediction(table: Table) -> Prediction:
    prediction = Prediction(
        verify_ms=table.number("verify_ms", 0.1, 10_000, 34),
        draft_ms=table.number("draft_ms", 0.01, 10_000, 3),
        acceptance=table.number("acceptance", 0, 1, 0.8),
        growth=table.text(
            "growth", "tree:32x6", pattern=r"[a-z]+:\S+", wanted="tree:ROWSxCHILDREN, chain:K or chain:K+AHEAD"
        ),
    )
    table.close()
    return prediction


def _prices(values: object) -> dict[tuple[str, str], float]:
    table = Table(values, "prices")
    prices = {}
    for region in dict(values) if isinstance(values, Mapping) else ():
        of_region = Table(table.raw(region), table.name(region))
        for kind in table.raw(region):
            prices[region, kind] = of_region.number(kind, 0, 1000)
    return prices


def _tags(table: Table) -> dict[str, str]:
    values = table.raw("tags", {})
    tags = Table(values, table.name("tags"))
    if len(values) > 20:
        raise SpecError(f"{table.name('tags')}: {len(values)} tags, at most 20")
    read = {key: tags.text(key, pattern=r".{1,256}", wanted="text of at most 256 characters") for key in values}
    for key in read:
        if key.startswith(("aws:", "foredraft:")) or key == "Name" or len(key) > 128:
            raise SpecError(
                f"{table.name('tags')}.{key}: a name of at most 128 characters, not Name, aws:* or foredraft:*"
            )
    return read
