"""A sweep of the embedded model killed at random moments, and one of two processes, against an unbroken one.

    python tests/benchmarks/sweep_kill.py FOLDER --prompts 1000 --kills 10 --processes 2

Each run is the command line in a process group of its own, killed by SIGKILL. Delays are drawn so that the kills are
spread over the whole work, loading the model included. Files are compared byte by byte: the exit code is 0 if all are
the same. `FOLDER` must be new.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import tl_neuron_attr as na

LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--mixed_precision", "no", "--num_machines", "1"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--k", type=int, default=300)
    parser.add_argument("--query", action="store_true")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--part-size", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1, help="of a last run, compared too")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir()
    path = given.folder / "prompts.jsonl"
    write_prompts(path, given.prompts)

    seconds = finished(given, path, "whole")
    say(f"unbroken: {seconds:.0f} s")
    same = True
    draw = random.Random(given.seed)
    for number in range(given.kills):
        delay = draw.uniform(0, 2 * (seconds / given.kills + 10))
        done = killed(given, path, "killed", delay)
        say(f"kill {number + 1} after {delay:.1f} s: {done} parts done")
    say(f"last run: {finished(given, path, 'killed'):.0f} s")
    same &= compared(given.folder, "killed")
    if given.processes > 1:
        say(f"{given.processes} processes: {finished(given, path, 'processes', given.processes):.0f} s")
        same &= compared(given.folder, "processes")
    return 0 if same else 1


def write_prompts(path: Path, count: int) -> None:
    known = na.load_knowledge()
    chosen = [known[i * len(known) // count] for i in range(count)] if count <= len(known) else known
    lines = [json.dumps({"prompt": one.prompt, "answer": one.answer, "type": one.type}) for one in chosen]
    path.write_text("\n".join(lines) + "\n")


def started(given: argparse.Namespace, path: Path, out: str, processes: int = 1) -> "subprocess.Popen[bytes]":
    command = ["-m", "tl_neuron_attr", "sweep", str(path), "--out", str(given.folder / out), "--k", str(given.k)]
    command += ["--batch-size", str(given.batch_size), "--part-size", str(given.part_size)]
    command += ["--query"] * given.query
    if processes > 1:
        command = [*LAUNCH, "--num_processes", str(processes), "--main_process_port", "0", *command]
    log = (given.folder / f"{out}.log").open("ab")
    return subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, start_new_session=True)


def finished(given: argparse.Namespace, path: Path, out: str, processes: int = 1) -> float:
    start = time.perf_counter()
    code = started(given, path, out, processes).wait()
    if code not in (0, 3) and processes == 1:
        raise SystemExit(f"exit code {code}: see {given.folder / out}.log")
    return time.perf_counter() - start


def killed(given: argparse.Namespace, path: Path, out: str, delay: float) -> int:
    process = started(given, path, out)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return len(list((given.folder / out / "prompts").glob("part-*.parquet")))


def compared(folder: Path, out: str) -> bool:
    whole, other = (
        {path.relative_to(folder / name): path.read_bytes() for path in (folder / name).rglob("*") if path.is_file()}
        for name in ("whole", out)
    )
    differing = sorted(str(name) for name in {*whole, *other} if whole.get(name) != other.get(name))
    say(f"{out}: {len(whole)} files, {f'differing: {differing}' if differing else 'all the same'}")
    return not differing


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
