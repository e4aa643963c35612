"""How long an audit of a large matrix takes, and how much memory.

    python benchmarks/audit.py --rows 152064 --width 8192 --dtype bfloat16 --device cuda
    python benchmarks/audit.py --rows 50257 --width 768 --dtype float32 --device cpu

Writes a random anisotropic matrix (a shared mean, falling spectrum) to a temporary directory in slices, drops it
from the page cache, audits it, prints one JSON object and deletes the file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import torch

from leafward.measure.audit_matrix import audit
from leafward.measure.matrix_files import SLICE_ROWS

DTYPES = {"float32": ("F32", torch.float32), "float16": ("F16", torch.float16), "bfloat16": ("BF16", torch.bfloat16)}
WRITE_ROWS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50257)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--exact-parts",
        choices=("sums", "pairs"),
        default="sums",
        help="sums: m×m sums exact, pair statistics sampled; pairs: these too, from all n² pairs",
    )
    parser.add_argument("--directory", help="where to put the matrix (default: the system's temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        path = Path(directory) / "matrix.safetensors"
        written = write_matrix(path, arguments.rows, arguments.width, arguments.dtype, arguments.device)
        print(json.dumps({**vars(arguments), "write_seconds": written, **measure(path, arguments)}, indent=2))


def write_matrix(path: Path, rows: int, width: int, dtype: str, device: str) -> float:
    """Write the matrix as safetensors, slice by slice, and drop it from the page cache; seconds taken."""
    began = time.perf_counter()
    name, kind = DTYPES[dtype]
    generator = torch.Generator(device).manual_seed(0)
    spectrum = torch.arange(1, width + 1, device=device).float().pow(-0.25)
    mean = 0.5 * torch.randn(width, generator=generator, device=device) * spectrum
    size = rows * width * kind.itemsize
    header = json.dumps({"weight": {"dtype": name, "shape": [rows, width], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for first in range(0, rows, WRITE_ROWS):
            count = min(WRITE_ROWS, rows - first)
            block = torch.randn(count, width, generator=generator, device=device) * spectrum + mean
            file.write(block.to(kind).cpu().view(torch.uint8).numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return time.perf_counter() - began


def measure(path: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds, peak host memory beyond the start and peak CUDA memory of one audit, and its main figures."""
    on_cuda = torch.device(arguments.device).type == "cuda"
    if on_cuda:  # the CUDA context and the solver's libraries are not the audit's memory
        torch.linalg.eigvalsh(torch.eye(64, dtype=torch.float64, device=arguments.device))
        torch.cuda.reset_peak_memory_stats()
    start = resident()
    began, worked = time.perf_counter(), time.process_time()
    report = audit(path, device=arguments.device, exact=arguments.exact_parts == "pairs")
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    slice_bytes = min(SLICE_ROWS, arguments.rows) * arguments.width * 4
    assert report.centred is not None
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_rss_beyond_start_gb": (peak - start) / 1e9,
        "float32_slice_gb": slice_bytes / 1e9,
        "float64_sum_gb": arguments.width**2 * 8 / 1e9,
        "peak_cuda_gb": torch.cuda.max_memory_allocated() / 1e9 if on_cuda else None,
        "threads": torch.get_num_threads(),
        "scaled_overlap": report.scaled_overlap,
        "centred_scaled_overlap": report.centred.scaled_overlap,
        "centred_fourth_moment": report.centred.fourth_moment.value,
        "centred_fourth_moment_error": report.centred.fourth_moment.error,
    }


def resident() -> int:
    """Bytes of this process in memory now (Linux), else the peak so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
