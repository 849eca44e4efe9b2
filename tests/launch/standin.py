"""Stands in for programs of clouds and clusters: `standin.py PROGRAM ARGS...`.

It keeps the world as files in the folder $WORLD: `calls` (one JSON list per call),
`resource` and `node` (states; several, one a line, are passed through look by look),
`trouble` (one line per failure to come: a word of the call, the status, and `late`
where the call does its work before it fails), `workers` (a home for each machine) and
`exits` (what the training on a machine does, run by run).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WORLD = Path(os.environ["WORLD"])
NOT_FOUND = "ERROR: (gcloud.compute.tpus.describe) NOT_FOUND: Resource was not found."


def record(call: list[str]) -> None:
    with (WORLD / "calls").open("a") as calls:
        calls.write(json.dumps(call) + "\n")


def take(path: Path, *, last: bool = False) -> str:
    """Returns a file's first line and drops it; `last` keeps the last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    if lines and not (last and len(lines) == 1):
        path.write_text("".join(f"{line}\n" for line in lines[1:]))
    return lines[0] if lines else ""


def stumble(call: list[str], *late: str) -> None:
    """Exits as the next planned trouble says, if it is meant for this call."""
    path = WORLD / "trouble"
    lines = path.read_text().splitlines() if path.exists() else []
    word, status, *when = lines[0].split() if lines else ("", "0")
    if word in " ".join(call).split() and when == list(late):
        take(path)
        print("ERROR: as planned", file=sys.stderr)
        sys.exit(int(status))


def gcloud(arguments: list[str]) -> int:
    kind, verb, name = arguments[2:5]
    if verb == "describe":
        looked_at = "node" if kind == "tpu-vm" else "resource"
        state = take(WORLD / looked_at, last=True)
        print(state or NOT_FOUND, file=sys.stdout if state else sys.stderr)
        return 0 if state else 1
    if verb == "create":
        for worker in range(2):
            home = WORLD / "workers" / str(worker)
            home.mkdir(parents=True)
        (WORLD / "node").write_text("READY\n")
        states = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
        (WORLD / "resource").write_text("\n".join(states))
    elif verb == "delete":
        shutil.rmtree(WORLD / "workers", ignore_errors=True)
        (WORLD / "resource").unlink(missing_ok=True)
        (WORLD / "node").unlink(missing_ok=True)
    elif verb == "scp":
        for home in (WORLD / "workers").iterdir():
            shutil.copy(name, home)
    elif verb == "ssh":
        return ssh(arguments)
    return 0


def ssh(arguments: list[str]) -> int:
    """Runs a command at home on each machine; the first failure is the status."""
    flags = dict(flag.partition("=")[::2] for flag in arguments if "=" in flag)
    which = flags["--worker"]
    homes = (
        sorted((WORLD / "workers").iterdir()) if (WORLD / "workers").exists() else []
    )
    running = [
        # As gcloud does, which splits the command, and ssh, which joins it again.
        subprocess.Popen(
            ["bash", "-c", " ".join(flags["--command"].split(" "))],
            cwd=home,
            env={**os.environ, "HOME": str(home), "HOSTNAME": f"worker-{home.name}"},
        )
        for home in homes
        if which in ("all", home.name)
    ]
    statuses = [process.wait() for process in running]
    if not running or "ACTIVE" not in (WORLD / "resource").read_text():
        return 255
    return next((status for status in statuses if status), 0)


def python3(arguments: list[str]) -> int:
    """What installs the package on a machine; the .venv's python is this file again."""
    if arguments[:3] == ["-m", "uv", "venv"]:
        program = Path(".venv/bin/python")
        program.parent.mkdir(parents=True, exist_ok=True)
        standin = f'exec {sys.executable} -ESs {__file__} training "$@"'
        program.write_text(f"#!/bin/sh\n{standin}\n")
        program.chmod(0o755)
    return 0


def sudo(arguments: list[str]) -> int:
    return subprocess.call(arguments)


def findmnt(arguments: list[str]) -> int:
    mounted = Path(os.environ["HOME"]) / "mounted"
    if not mounted.exists():
        return 1
    print(mounted.read_text())
    return 0


def mount(arguments: list[str]) -> int:
    """Mounts a share, or fails as a server that does not have it."""
    *_, share, folder = arguments
    home = Path(os.environ["HOME"])
    if share.endswith("/gone"):
        print("a warning\nmount.nfs: No such file or directory", file=sys.stderr)
        return 32
    if not Path(folder).is_dir():
        return 1
    (home / "mounted").write_text(share)
    Path(folder).chmod(0o555)  # a fresh one is another's
    record(["mounted", home.name, *arguments])
    return 0


def apt_get(arguments: list[str]) -> int:
    record(["apt-get", *arguments])
    if "install" in arguments and os.environ.get("NO_PACKAGES"):
        print("E: Unable to locate package nfs-common", file=sys.stderr)
        return 100
    return 0


def training(arguments: list[str]) -> int:
    """Does what `exits` has next: a status, `preempted`, `hangs` or `followed N`.

    The last one trains until its log has been followed N times, and succeeds.
    """
    place = os.environ.get("SLURM_PROCID") or Path(os.environ["HOME"]).name
    record(["training", place, *arguments])
    print(f"training on {place}", flush=True)
    does = take(WORLD / "exits" / place)
    if does == "preempted":
        (WORLD / "resource").write_text("SUSPENDED\n")
        return 75
    if does == "hangs":
        time.sleep(60)
    if does.startswith("followed"):
        deadline = time.monotonic() + 60
        while follows() < int(does.split()[1]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return 0
    return int(does)


def follows() -> int:
    """Counts the ssh calls that follow a log."""
    calls = map(json.loads, (WORLD / "calls").read_text().splitlines())
    return sum(" follow " in " ".join(call) for call in calls)


def srun(arguments: list[str]) -> int:
    """Runs the command once per task; the largest status is srun's."""
    command = arguments[arguments.index("bash") :]
    tasks = [
        subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(task)})
        for task in range(int(os.environ["SLURM_NTASKS"]))
    ]
    return max(task.wait() for task in tasks)


def squeue(arguments: list[str]) -> int:
    print((WORLD / "job").read_text())
    return 0


def scontrol(arguments: list[str]) -> int:
    return 0


def main() -> int:
    program, *arguments = sys.argv[1:]
    plays: dict[str, Callable[[list[str]], int]] = {
        play.__name__: play for play in (gcloud, srun, squeue, scontrol)
    }
    machine: dict[str, Callable[[list[str]], int]] = {
        "apt-get": apt_get,
        **{play.__name__: play for play in (findmnt, mount, python3, sudo, training)},
    }
    if program in machine:
        return machine[program](arguments)
    record([program, *arguments])
    stumble(arguments)
    status = plays[program](arguments)
    stumble(arguments, "late")
    return status


if __name__ == "__main__":
    sys.exit(main())
