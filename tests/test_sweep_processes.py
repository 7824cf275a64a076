"""A sweep killed with `kill -9`, and one of two processes under Accelerate, on the embedded model.

`test_sweep_kills.py` dies at every point of writing, on a tiny model.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sweep_prompts import files

import tl_neuron_attr as na

pytestmark = pytest.mark.any_release

PROMPTS = (
    {"prompt": "The capital of France is", "answer": " Paris", "type": "capital"},
    {"prompt": "The capital of Italy is", "answer": "Antidisestablishment", "type": "capital"},
    {"prompt": "The color of grass is", "answer": "green", "type": "colour"},
    {"prompt": "Two and two make"},
    {"prompt": "The month after May is", "answer": "June", "type": "month"},
)
OPTIONS = {"k": 10, "part_size": 1}


def command(path: Path, out: Path) -> list[str]:
    options = ["--k", str(OPTIONS["k"]), "--part-size", str(OPTIONS["part_size"])]
    return ["-m", "tl_neuron_attr", "sweep", str(path), "--out", str(out), *options]


def started(arguments: list[str], folder: Path) -> "subprocess.Popen[str]":
    """In a process group of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(na.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A file of prompts, and the files of an unbroken sweep in this process."""
    folder = tmp_path_factory.mktemp("sweep")
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    done = na.sweep(na.load_demo_model(), path, folder / "whole", progress=False, **OPTIONS)
    assert [error.line for error in done.errors] == [2]
    return path, files(folder / "whole")


def test_one_process_killed_and_two_that_go_on(whole: Any, tmp_path: Path) -> None:
    path, expected = whole
    out = tmp_path / "out"
    process = started(command(path, out), tmp_path)
    while process.poll() is None and not list(out.glob("prompts/part-*.parquet")):
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    n_done = len(na.load_sweep(out).parts)
    assert 1 <= n_done <= 3

    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--mixed_precision=no"]
    launch += ["--num_machines", "1", "--dynamo_backend", "no", "--main_process_port", "0"]
    process = started([*launch, *command(path, out)], tmp_path)
    stdout, stderr = process.communicate()
    assert "exitcode  : 3" in stderr, stderr
    assert stdout.splitlines()[:2] == [
        f"{out}: 4 of 5 prompts have a result",
        f"1 without one, named in {out / 'errors.jsonl'}",
    ]
    assert f"this run: {len(PROMPTS) - n_done} prompts in" in stdout
    assert files(out) == expected
