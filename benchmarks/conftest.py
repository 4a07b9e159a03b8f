"""Prints the suites' table at the end, with rates and ratios beside pytest-benchmark's times."""

from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread a rank, as torchrun sets it: what is compared is the passes, not how many cores they find."""
    torch.set_num_threads(1)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["torch"] = torch.__version__
    machine_info["torch_threads"] = torch.get_num_threads()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    benchmarks = getattr(terminalreporter.config, "_benchmarksession", None)
    rows = [b for b in benchmarks.benchmarks if b.stats.rounds] if benchmarks else []
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for group, members in groups.items():
        limit = next((m for m in members if m.extra_info.get("is_limit")), None)
        terminalreporter.write_sep("-", f"{group}: median [p10, p90]", bold=True)
        for member in sorted(members, key=lambda m: m.stats.median):
            terminalreporter.write_line(_line(member, limit))


def _line(benchmark: Any, limit: Any) -> str:
    times = benchmark.stats.sorted_data
    low, high = times[len(times) // 10], times[len(times) * 9 // 10]
    median = benchmark.stats.median
    text = f"{benchmark.extra_info['what']:<32} {median * 1e6:10.1f} us [{low * 1e6:10.1f}, {high * 1e6:10.1f}]"
    if "bytes" in benchmark.extra_info:
        text += f" {benchmark.extra_info['bytes'] / median / 1e9:6.1f} GB/s"
    if limit is not None:
        text += f"  {median / limit.stats.median:6.2f} x {limit.extra_info['what']}"
    return text
