"""Forks of a program that has imported torch, some of which are the ranks of one process group.

Starting Python with torch and transformers takes seconds, while a fork of a process that has
imported them takes no time. The program must not have computed anything with torch before it forks,
because threads do not exist in a fork.
"""

import contextlib
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path


def fork(error_folder: Path, work: Callable[[], object]) -> int:
    """Run ``work`` in a fork; return the process id. An error is written into the folder."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (
            open(os.devnull, "w") as null,
            contextlib.redirect_stdout(null),
            contextlib.redirect_stderr(null),
        ):
            work()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except Exception:
        (error_folder / f"error-{os.getpid()}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """Wait for a fork to end; return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def find_free_port() -> int:
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return free_socket.getsockname()[1]


def run_on_ranks(error_folder: Path, num_ranks: int, work: Callable[[int], object]) -> list[int]:
    """Run ``work`` in forks that are the ranks of one process group; return their exit codes.

    Models must be created before the forks: transformers lets only the first rank write the folder
    that a model is loaded from.
    """
    port = find_free_port()

    def run_rank(rank: int) -> None:
        os.environ["RANK"] = str(rank)
        os.environ["LOCAL_RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(num_ranks)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(port)
        work(rank)

    children = [fork(error_folder, lambda rank=rank: run_rank(rank)) for rank in range(num_ranks)]
    return [wait(child) for child in children]
