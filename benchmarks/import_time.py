"""What `import monoplan` adds to numpy's own import: medians over fresh processes, alternating.

python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = (
    "import time; a = time.perf_counter(); import numpy; b = time.perf_counter(); {};"
    "print(b - a, time.perf_counter() - b)"
)


def run(statement: str) -> tuple[float, float]:
    """Seconds of numpy's import and of the statement after it, in a new process."""
    out = subprocess.run([sys.executable, "-c", CODE.format(statement)], capture_output=True, text=True, check=True)
    first, second = out.stdout.split()
    return float(first), float(second)


def main(repeats: int = 15) -> None:
    statements = {
        "import monoplan": "import monoplan",
        "from monoplan import nn": "from monoplan import nn",
        "mp.compile (the name)": "import monoplan; monoplan.compile",
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in statements}
    for _ in range(repeats):
        for name, code in statements.items():
            times[name].append(run(code))
    numpy = statistics.median(t[0] for all_ in times.values() for t in all_)
    print(f"| statement | added to numpy's {numpy * 1e3:.0f} ms |\n|---|---|")
    for name, all_ in times.items():
        print(f"| `{name}` | {statistics.median(t[1] for t in all_) * 1e3:.0f} ms |")


if __name__ == "__main__":
    main()
