"""Two real gloo ranks for a test: a file of the tests run by torch's own launcher."""

import os
import subprocess
import sys
from pathlib import Path


def on_two_ranks(file, *arguments):
    """The finished process of `file`, run on each of two ranks with these arguments; it must succeed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    run = subprocess.run(
        [*command, str(file), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | paths,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run
