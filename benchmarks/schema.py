"""Run schemathesis in full against a server of the demo models: every operation of its OpenAPI
document, edge cases of every field, and random requests.

    python benchmarks/schema.py [--examples 300] [--seed 1]

Exits with 1 if the server answers with a 5xx or violates its document. A request that fits the
document may still get a 400, since schemas cannot express all rules between fields.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from soak import Server, is_error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        server = Server([], log)
        try:
            asyncio.run(server.start())
            command = Path(sys.executable).with_name("schemathesis")
            run = subprocess.run(
                [command, "run", f"http://127.0.0.1:{server.port}/openapi.json",
                 "--checks=all", "--exclude-checks=positive_data_acceptance",
                 "--request-timeout=120", "--continue-on-failure", f"--seed={arguments.seed}",
                 f"--max-examples={arguments.examples}"],
                cwd=directory, env={**os.environ, "NO_COLOR": "1"},
            )  # fmt: skip
            server.process.terminate()
            status = server.process.wait(60)
        finally:
            server.process.kill()
        errors = [line for line in log.read_text().splitlines() if is_error(line)]
    for line in errors[:5]:
        print(f"in the log: {line}")
    return 1 if run.returncode or status or errors else 0


if __name__ == "__main__":
    sys.exit(main())
