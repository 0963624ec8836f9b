"""The simulated allocator against what CUDACachingAllocator.cpp says it does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from allocator_runs import SETTINGS, Event, held, requests

from hfopt.errors import ConfigError
from hfopt.memory.allocator import AllocatorOptions, CachingAllocator, OutOfMemory, parse_alloc_conf
from hfopt.units import MIB

RECORDED = json.loads((Path(__file__).parent / "allocator_runs.json").read_text())
by_setting = pytest.mark.parametrize(("conf", "capacity_mib"), SETTINGS)


def simulated(events: list[Event], options: AllocatorOptions, capacity_mib: int | None) -> list[tuple[int, int]]:
    allocator = CachingAllocator(options, capacity_bytes=capacity_mib * MIB if capacity_mib else None)
    found = []
    for number, size, stream in events:
        try:
            allocator.allocate(number, size, stream) if size else allocator.free(number)
        except OutOfMemory:
            break
        found.append((allocator.allocated, allocator.reserved))
    most_allocated, most_reserved = (max(column) for column in zip(*found, strict=True))
    assert (allocator.peak_allocated, allocator.peak_reserved) == (most_allocated, most_reserved)
    return found


@by_setting
def test_it_holds_what_pytorch_was_seen_to_hold(conf: str, capacity_mib: int | None) -> None:
    """After each of some random requests, as recorded of PyTorch on the virtual GPU."""
    options = replace(parse_alloc_conf(conf), torch_version=tuple(map(int, RECORDED["torch"].split("."))))
    runs = [run for run in RECORDED["runs"] if (run["conf"], run["capacity_mib"]) == (conf, capacity_mib)]
    assert runs
    for run in runs:
        seen = [(512 * blocks, mib * MIB) for blocks, mib in zip(run["allocated"], run["reserved"], strict=True)]
        assert simulated(requests(run["seed"]), options, capacity_mib) == seen


@pytest.mark.slow
@pytest.mark.virtual_gpu
@by_setting
def test_it_holds_what_pytorch_holds(conf: str, capacity_mib: int | None) -> None:
    """The same on the installed PyTorch, and more of it."""
    runs = [requests(seed) for seed in range(100, 140)]
    assert [simulated(run, parse_alloc_conf(conf), capacity_mib) for run in runs] == held(runs, conf, capacity_mib)


def test_small_requests_share_a_two_mib_segment() -> None:
    allocator = CachingAllocator()
    for number in range(4):
        allocator.allocate(number, 100)
    assert (allocator.allocated, allocator.reserved) == (4 * 512, 2 * MIB)


@pytest.mark.parametrize(
    ("request_bytes", "segment"), [(MIB + 1, 20 * MIB), (9 * MIB, 20 * MIB), (10 * MIB, 10 * MIB), (11 * MIB + 5, 12 * MIB)]
)
def test_large_requests_take_a_segment_by_their_size(request_bytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, request_bytes)
    assert allocator.reserved == segment


def test_a_large_block_keeps_a_remainder_of_up_to_one_mib() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 20 * MIB)
    allocator.free(0)
    allocator.allocate(1, 19 * MIB)  # 1 MiB left: not split
    assert allocator.allocated == 20 * MIB
    allocator.free(1)
    allocator.allocate(2, 19 * MIB - 512)  # more than 1 MiB left: split
    assert allocator.allocated == 19 * MIB - 512


def test_freed_neighbours_merge_and_serve_a_larger_request() -> None:
    allocator = CachingAllocator()
    for number in range(2):
        allocator.allocate(number, 8 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_cached_segments_are_given_back_before_running_out() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.allocate(0, 60 * MIB)
    allocator.free(0)
    allocator.allocate(1, 80 * MIB)  # only fits once the cached 60 MiB are returned
    assert (allocator.reserved, allocator.peak_reserved) == (80 * MIB, 80 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(2, 30 * MIB)


def test_expandable_segments_reuse_what_plain_segments_cannot() -> None:
    plain, expandable = CachingAllocator(), CachingAllocator(AllocatorOptions(expandable_segments=True))
    for allocator in (plain, expandable):
        for number in range(4):
            allocator.allocate(number, 30 * MIB)
        for number in range(4):
            allocator.free(number)
        allocator.allocate(9, 110 * MIB)
    assert plain.reserved == 230 * MIB
    assert expandable.reserved == 120 * MIB


def test_a_split_limit_keeps_large_blocks_whole() -> None:
    allocator = CachingAllocator(AllocatorOptions(max_split_bytes=64 * MIB))
    allocator.allocate(0, 100 * MIB)
    allocator.free(0)
    allocator.allocate(1, 40 * MIB)
    assert allocator.reserved == 140 * MIB


def test_no_more_than_enough_is_given_back_with_a_split_limit() -> None:
    """As PyTorch 2.15 did on the virtual GPU: two segments of 70 MiB make room for 140, to the byte, and the others stay."""
    allocator = CachingAllocator(AllocatorOptions(max_split_bytes=64 * MIB), capacity_bytes=220 * MIB)
    for number, mib in enumerate((64, 70, 70, 10)):
        allocator.allocate(number, mib * MIB)
    for number in range(4):
        allocator.free(number)
    allocator.allocate(4, 140 * MIB)
    assert (allocator.allocated, allocator.reserved) == (140 * MIB, 214 * MIB)


def test_of_equal_blocks_in_an_expandable_segment_the_lowest_serves() -> None:
    """As PyTorch 2.15 did on the virtual GPU: the third of five stays free, so that with the fourth it makes 40 MiB."""
    allocator = CachingAllocator(AllocatorOptions(expandable_segments=True))
    for number in range(5):
        allocator.allocate(number, 20 * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(5, 20 * MIB)
    allocator.free(3)
    allocator.allocate(6, 40 * MIB)
    assert (allocator.allocated, allocator.reserved) == (100 * MIB, 100 * MIB)


def test_a_stream_has_its_own_cache_and_none_named_is_the_first() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 10 * MIB)
    allocator.free(0)
    allocator.allocate(1, 10 * MIB, stream=0)
    assert allocator.reserved == 10 * MIB
    allocator.allocate(2, 10 * MIB, stream=1)
    assert allocator.reserved == 20 * MIB


def test_the_environment_variable_is_read() -> None:
    options = parse_alloc_conf("max_split_size_mb:128, garbage_collection_threshold:0.8,expandable_segments:True,backend:native")
    assert options == AllocatorOptions(expandable_segments=True, max_split_bytes=128 * MIB)
    assert parse_alloc_conf(None) == parse_alloc_conf("roundup_power2_divisions:1") == AllocatorOptions()
    assert parse_alloc_conf("roundup_power2_divisions:8") == AllocatorOptions(roundup_power2_divisions=8)
    with pytest.raises(ConfigError, match="max_split_size_mb"):
        parse_alloc_conf("max_split_size_mb")


@pytest.mark.parametrize(("version", "fits"), [((2, 15), True), ((2, 13), True), ((2, 12), False), ((2, 6), False)])
def test_of_equal_blocks_the_oldest_or_the_newest_segment_serves(version: tuple[int, int], fits: bool) -> None:
    allocator = CachingAllocator(AllocatorOptions(torch_version=version), capacity_bytes=55 * MIB)
    allocator.allocate(0, 30 * MIB)
    allocator.allocate(1, 20 * MIB)
    allocator.free(0)
    allocator.allocate(2, 10 * MIB)  # of the first segment 20 MiB are left, as many as the second has
    allocator.free(1)
    allocator.allocate(3, 20 * MIB)
    if fits:  # taken from the first: the second can be given back
        allocator.allocate(4, 24 * MIB)
        assert allocator.reserved == 54 * MIB
    else:
        with pytest.raises(OutOfMemory):
            allocator.allocate(4, 24 * MIB)
