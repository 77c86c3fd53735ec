"""Every kernel compiles for a GPU that is not here: types and shared memory, which the interpreter knows nothing of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

SHARED_MEMORY = 227 * 1024  # of a Hopper multiprocessor, for one program


@pytest.mark.slow
def test_given_no_gpu_then_all_kernels_compile_for_one_and_fit_its_memory() -> None:
    """Takes a minute. Triton keeps what it has compiled, by the text of the kernels, so it takes seconds the next time."""
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    compiled = [line.split("\t") for line in done.stdout.splitlines()]
    kernels = {"attend_kernel", "merge_kernel", "prefill_kernel", "prefill_quantized_kernel", "latent_kernel"}
    assert {name for name, _, _ in compiled} == kernels | {
        "_convert_kernel",
        "_quantize_kernel",
        "_copy_blocks_kernel",
        "_copy_tokens_kernel",
        "_copy_words_kernel",
        "_convolve_kernel",
        "_convolve_one_kernel",
        "_delta_rule_kernel",
        "_expand_kernel",
        "_experts_kernel",
        "_keep_inputs_kernel",
        "_select_kernel",
        "_shrink_kernel",
        "score_kernel",
    }
    too_large = [(name, case, shared) for name, case, shared in compiled if int(shared) > SHARED_MEMORY]
    assert not too_large
