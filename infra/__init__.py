"""Two regions and a relay, up and down with one command.

    spec.py       the TOML file, validated                          pure
    state.py      what exists, as observed by tag                   pure
    placement.py  round trips, prices, the relay's region           pure
    plan.py       (spec, observed) -> actions                       pure
    boot.py       user data and systemd units of an instance        pure
    provider.py   what a cloud must be able to do
    aws/          that, with boto3
    apply.py      performs a plan: order, waits, retries, rollback
    agent.py      what runs on the instances besides the node itself

Imports the standard library and boto3, nothing of ours: the machine that provisions needs no torch, and an instance
can run the agent before anything else is installed.
"""
