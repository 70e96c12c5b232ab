"""Stand-in for the Python executable that runs the programs of a shell script in forks of this process."""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

CLIENT = r"""
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect(sys.argv[1])
    socket.send_fds(link, [json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode() + b"\n"], [0, 1, 2])
    sys.exit(int(link.recv(8) or 70))
"""
LIMIT = 300  # seconds of a program, after which the system kills it


class WarmPython:
    """Executable that takes the options `-c` and `-m` of Python, and runs its programs in forks of this process.

    Args:
        folder: folder for the executable, `path`.
    """

    def __init__(self, folder: Path) -> None:
        self._sockets = tempfile.TemporaryDirectory()  # its name is short, as that of a socket must be
        address, client = Path(self._sockets.name, "socket"), folder / "client.py"
        client.write_text(CLIENT)
        self.path: Path = folder / "python"
        self.path.write_text(f"#!/bin/sh\nexec '{sys.executable}' -SE '{client}' '{address}' \"$@\"\n")
        self.path.chmod(0o755)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(address))
        self._server.listen()

    def close(self) -> None:
        """Close the socket and remove its folder."""
        self._server.close()
        self._sockets.cleanup()

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command, and the programs that it gives to `path`, one after the other."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors)
            while process.poll() is None:
                if select.select([self._server], [], [], 0.02)[0]:
                    self._serve()
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, process.returncode, output.read(), errors.read())

    def _serve(self) -> None:
        link, _ = self._server.accept()
        with link:
            message, handles, _, _ = socket.recv_fds(link, 1 << 16, 3)
            while not message.endswith(b"\n") and (more := link.recv(1 << 16)):
                message += more
            command = json.loads(message)
            child = os.fork()
            if child == 0:
                try:
                    _execute(*command, handles)
                finally:  # also if the output is closed: a fork must not go on with the tests
                    os._exit(70)
            for handle in handles:
                os.close(handle)
            _, status = os.waitpid(child, 0)
            with suppress(BrokenPipeError):  # the script has killed the program
                link.send(str(os.waitstatus_to_exitcode(status)).encode())


def _execute(arguments: list[str], folder: str, environment: dict[str, str], handles: list[int]) -> NoReturn:
    """Run `python ARGUMENTS` in this process, and end it."""
    status: object = 1
    signal.alarm(LIMIT)
    try:
        for number, handle in enumerate(handles):
            os.dup2(handle, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        option, program, *rest = arguments
        sys.argv = [option if option == "-c" else program, *rest]
        if option == "-c":
            exec(program, {"__name__": "__main__"})
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))  # pyright: ignore[reportArgumentType]
