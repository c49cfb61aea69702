"""schemathesis in full against a server of the demo models: every operation of its OpenAPI
document, edge cases of every field and requests at random.

    python benchmarks/schema.py [--examples 300] [--seed 1]

It exits with 1 where the server answers with a 5xx, or otherwise than its document says. Requests
that fit the document may still be a 400, since schemas cannot say all that fields mean together.
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
            found = subprocess.run(
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
        shouts = [line for line in log.read_text().splitlines() if is_error(line)]
    for line in shouts[:5]:
        print(f"in the log: {line}")
    return 1 if found.returncode or status or shouts else 0


if __name__ == "__main__":
    sys.exit(main())
