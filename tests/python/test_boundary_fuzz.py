"""Some hundred calls of boundary_fuzz.py, in a process of its own, which a fault would end.

KVANT_FUZZ_CALLS=20000 makes more, KVANT_FUZZ_SEED=2 others. `boundary_fuzz.py --seed S --only I` makes one again.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("boundary_fuzz.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards its memory with Linux's mprotect")
def test_calls_are_right_or_refused_and_touch_no_other_memory():
    pytest.importorskip("torch")
    calls, seed = os.environ.get("KVANT_FUZZ_CALLS", "400"), os.environ.get("KVANT_FUZZ_SEED", "1")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--calls", calls, "--seed", seed], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}, {calls} calls: " in done.stdout
