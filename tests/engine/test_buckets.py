import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.buckets import Buckets, Shape, doubling
from engine.errors import CacheError


def test_buckets_are_an_explicit_list() -> None:
    buckets = Buckets.powers(max_rows=64, full_rows=9, first_length=512, capacity=4104)
    assert buckets == Buckets(rows=(1, 2, 4, 8, 16, 32, 64), full_rows=16, lengths=(512, 1024, 2048, 4104))
    shapes = buckets.shapes(512)
    assert len(shapes) == len(set(shapes)) == 11
    assert {(s.num_rows, s.num_logits) for s in shapes} == {
        (1, 1), (2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 8), (16, 1), (16, 16), (32, 1), (64, 1)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first", "last", "steps"),
    [(512, 100, (100,)), (512, 600, (600,)), (512, 700, (512, 700)), (512, 2056, (512, 1024, 2056)), (1, 1, (1,))],
)
def test_lengths_double_up_to_the_capacity(first: int, last: int, steps: tuple[int, ...]) -> None:
    assert doubling(first, last) == steps


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 5000), st.data())
def test_every_pass_within_the_limits_fits_its_shape(
    max_rows: int, full_rows: int, capacity: int, data: st.DataObject
) -> None:
    buckets = Buckets.powers(max_rows=max_rows, full_rows=full_rows, first_length=512, capacity=capacity)
    num_rows = data.draw(st.integers(1, max(max_rows, full_rows)))
    num_logits = data.draw(st.integers(1, num_rows)) if num_rows <= full_rows else 1
    length = data.draw(st.integers(1, capacity))
    shape = buckets.shape(num_rows, length, num_logits)
    assert num_rows <= shape.num_rows < 2 * num_rows
    assert shape.length >= length
    assert shape.num_logits >= num_logits
    assert shape in buckets.shapes(shape.length)


@pytest.mark.parametrize("asked", [(65, 10, 1), (17, 10, 2), (1, 4105, 1)])
def test_a_pass_that_fits_no_shape_is_refused_with_the_limits(asked: tuple[int, int, int]) -> None:
    buckets = Buckets.powers(max_rows=64, full_rows=9, first_length=512, capacity=4104)
    with pytest.raises(CacheError, match="exceeds the largest: 64 rows, 16 of them with logits, over 4104 rows"):
        buckets.shape(*asked)
    assert buckets.shape(16, 4104, 16) == Shape(16, 4104, 16)
