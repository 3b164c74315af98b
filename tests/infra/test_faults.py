"""Whatever goes wrong in `up` or `down`, a `down` afterwards leaves nothing, and succeeds only then."""

from __future__ import annotations

import pytest

from tests.infra.doubles import Bench, Faults
from tests.infra.fault_list import DOWN_FAULTS, UP_FAULTS, DownFault, UpFault, run_down_fault, run_up_fault


@pytest.mark.parametrize(
    "fault", [f for f in UP_FAULTS if not f.killed], ids=lambda fault: fault.name.replace(" ", "-")
)
def test_nothing_is_left_after_a_fault_in_up_and_a_down(bench: Bench, faults: Faults, fault: UpFault) -> None:
    assert run_up_fault(fault, bench, faults) is fault.succeeds
    if fault.succeeds:
        assert bench.down() > 0
    else:
        # The roll-back has done it already.
        assert bench.down() == 0
    assert bench.everything_in_moto() == []


@pytest.mark.parametrize("fault", [f for f in UP_FAULTS if f.killed], ids=lambda fault: fault.name.replace(" ", "-"))
def test_an_up_after_a_killed_one_goes_on_from_there(bench: Bench, faults: Faults, fault: UpFault) -> None:
    """Resumed, not repeated: one instance a slot, although nothing local is known of the first run."""
    run_up_fault(fault, bench, faults)
    known = {instance.id for instance in bench.observe().alive()}
    done = bench.up()
    alive = bench.observe().alive()
    assert sorted(instance.slot for instance in alive) == ["draft-0", "relay", "verify-0"]
    assert known <= set(done.instance_ids.values())
    bench.down()
    assert bench.everything_in_moto() == []


@pytest.mark.parametrize("fault", DOWN_FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_second_down_finishes_what_a_fault_kept(bench: Bench, faults: Faults, fault: DownFault) -> None:
    succeeded = run_down_fault(fault, bench, faults)
    assert succeeded is fault.succeeds
    assert succeeded is (bench.everything_in_moto() == [])
    bench.down()
    assert bench.everything_in_moto() == []
