"""The journal of a timed rehearsal: read back, and what each launch in it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfopt.virtual.launch_cost import Issue, ProcessJournal, fetch_seconds, grouped, issues, read_journal

VECTORIZED = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIN3c108BFloat16EEESt5arrayIPcLm3EEEEviT0_T1_"


def line(kind: str, cpu_us: int, *fields: object, op: int = 0, thread: int = 0, stream: str = "0") -> str:
    return "\t".join(map(str, (kind, thread, cpu_us * 1000, op, stream, *fields))) + "\n"


def journal(folder: Path, *lines: str) -> ProcessJournal:
    path = folder / "journal-7.tsv"
    path.write_text("".join(lines))
    return read_journal(path)


def priced(folder: Path, *lines: str) -> list[Issue]:
    read = journal(folder, line("step", 0, 1), line("phase", 1, "forward"), *lines, line("step", 100, 2))
    return [issue for issue in issues(read.steps[0], read.kernel_names) if issue.cost is not None or issue.link is not None]


def test_steps_are_what_lies_between_their_ends(tmp_path: Path) -> None:
    read = journal(
        tmp_path,
        line("kernel", 1, 0, "1,1,1", "128,1,1", -1),  # before the first end: of no step
        line("step", 2, 1, "tf32=0", "workers=2"),
        line("phase", 3, "forward"),
        line("name", 3, 5, VECTORIZED),
        line("kernel", 4, 5, "2,1,1", "128,1,1", 512),
        line("phase", 5, "backward"),
        line("kernel", 6, 5, "2,1,1", "128,1,1", 512),
        line("kernel", 7, 5, "2,1,1", "128,1,1", 512),
        line("step", 8, 2, "tf32=1", "workers=2"),
        line("kernel", 9, 5, "2,1,1", "128,1,1", 512),
        "kernel\t9",  # the process was ended here
    )
    (step,) = read.steps
    assert (step.number, step.with_operations, step.facts) == (2, True, {"tf32": "1", "workers": "2"})
    assert [(entry.phase, entry.visit, entry.place) for entry in step.entries if entry.launches] == [
        ("forward", 1, 0),
        ("backward", 2, 0),
        ("backward", 2, 1),
    ]
    assert read.kernel_names == {"5": VECTORIZED}


def test_without_a_trainer_the_backward_is_known_by_its_thread(tmp_path: Path) -> None:
    launched = [line("kernel", 3, 0, "1,1,1", "32,1,1", -1), line("kernel", 4, 0, "1,1,1", "32,1,1", -1, thread=99)]
    read = journal(tmp_path, line("step", 1, 1), line("phase", 2, "script"), *launched, line("step", 5, 2))
    assert [entry.phase for entry in read.steps[0].entries if entry.launches] == ["forward", "backward"]


def test_a_product_costs_what_its_call_says_and_what_else_its_operation_launched_by_name(tmp_path: Path) -> None:
    found = priced(
        tmp_path,
        line("name", 2, 5, VECTORIZED),
        line("kernel", 3, 5, "2,1,1", "128,1,1", 1000, op=1),
        line("gemm", 4, 64, 32, 16, 2, 14, -1, op=1),
        line("op", 5, "addmm", "matmul", "float32", 1.0, 1.0, 1, "64,32,16,1", op=1),
    )
    kernel, product = (issue.cost for issue in found)
    assert kernel is not None and product is not None
    assert (kernel.kind, kernel.bytes_constant) == ("elementwise", 1000 * 3 * 2)  # three operands of two bytes, by the kernel's name
    assert (product.kind, product.dtype, product.flops_constant) == ("matmul", "bfloat16", 2.0 * 64 * 32 * 16 * 2)
    assert product.bytes_constant == 2 * 2 * (64 * 16 + 16 * 32 + 64 * 32)
    assert product.shape == ((64, 0), (32, 0), (16, 0), (2, 0))


def test_kernels_of_one_operation_share_its_cost(tmp_path: Path) -> None:
    kernel = line("kernel", 3, 0, "1,1,1", "32,1,1", -1, op=4)
    found = priced(tmp_path, kernel, kernel, line("op", 4, "sum", "reduction", "float32", 300.0, 1000.0, 3, "", op=4))
    assert [issue.cost and issue.cost.bytes_constant for issue in found] == [1500.0, 1500.0]  # three launches were foreseen, two were made
    (group,) = grouped(found)
    assert (group.count, group.name, group.phase) == (2.0, "sum", "forward")


def test_an_operation_whose_launch_cannot_be_seen_is_one_launch_and_a_read_is_none(tmp_path: Path) -> None:
    found = priced(
        tmp_path,
        line("op", 3, "native_batch_norm", "reduction", "float32", 1.0, 800.0, 1, "", op=1),
        line("op", 4, "_local_scalar_dense", "other", "float32", 0.0, 0.0, 1, "", op=2),
    )
    assert [(issue.entry.op, issue.cost and issue.cost.bytes_constant) for issue in found] == [(1, 800.0)]


@pytest.mark.parametrize(
    ("fields", "link", "link_bytes"),
    [
        (("copy", 3, 0, 1, 4096), "host", 4096.0),
        (("copy", 3, 1, 0, 8), "host", 8.0),
        (("nccl", 3, "all_reduce", 4, 4000), "ranks", 6000.0),
        (("nccl", 3, "all_gather", 4, 4000), "ranks", 3000.0),
    ],
)
def test_copies_to_the_host_and_collectives_go_over_a_link(tmp_path: Path, fields: tuple[str, int], link: str, link_bytes: float) -> None:
    (issue,) = priced(tmp_path, line(*fields))
    assert (issue.cost, issue.link, issue.link_bytes) == (None, link, link_bytes)


def test_copies_and_fills_on_the_card_and_unknown_kernels_have_a_cost_of_their_own(tmp_path: Path) -> None:
    found = priced(
        tmp_path,
        line("copy", 3, 1, 1, 100),
        line("fill", 4, 300),
        line("kernel", 5, 0, "10,2,1", "64,1,1", -1),
    )
    assert [issue.cost and issue.cost.bytes_constant for issue in found] == [200.0, 300.0, 10 * 2 * 64 * 4 * 2 * 4.0]


def test_fetching_is_read_from_every_process(tmp_path: Path) -> None:
    (tmp_path / "fetch-1.txt").write_text("0.25\n0.5\n")
    (tmp_path / "fetch-2.txt").write_text("1.0\n")
    assert fetch_seconds(tmp_path) == [0.25, 0.5, 1.0]
