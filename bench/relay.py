"""What the relay of `llamactl run` costs: processor time and latency at a given rate of chunks.

A source on a unix socket sends small chunks, each with the time, over many connections; a client
reads them once straight from there and once through the relay, which is a process of its own.
Little is imported: what is counts as memory of the relay, which is forked from here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

from llamactl_cli.run.relay import Relay

STAMP_BYTES = 20
CHUNK_BYTES = 240
"""About one token of a streamed chat completion, with all that is around it."""


async def source(path: str, pause_s: float) -> asyncio.Server:
    """Serve chunks, one each `pause_s` seconds to every connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        due = time.monotonic()
        with contextlib.suppress(asyncio.CancelledError):  # the end of the measurement
            while not writer.is_closing():
                stamp = b"%020d" % time.monotonic_ns()
                writer.write(stamp.ljust(CHUNK_BYTES - 1, b".") + b"\n")
                due += pause_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    return await asyncio.start_unix_server(serve, path)


async def drain(reader: asyncio.StreamReader, until: float, late_ns: list[int]) -> None:
    """Note how old each chunk is when it comes."""
    while time.monotonic() < until:
        line = await reader.readline()
        late_ns.append(time.monotonic_ns() - int(line[:STAMP_BYTES]))


async def measure(address: str | tuple[str, int], streams: int, seconds: float) -> list[int]:
    """Return the ages in ns of all chunks that came in that time."""
    late_ns: list[int] = []
    until = time.monotonic() + seconds
    ends, work = [], []
    for _ in range(streams):
        if isinstance(address, str):
            reader, writer = await asyncio.open_unix_connection(address)
        else:
            reader, writer = await asyncio.open_connection(*address)
        writer.write(b"go\n")
        ends.append(writer)
        work.append(drain(reader, until, late_ns))
    await asyncio.gather(*work)
    for writer in ends:
        writer.close()
    return late_ns


def relaying(path: str) -> tuple[int, tuple[str, int], int]:
    """Fork a relay; return its pid, its address, and a pipe whose end ends it."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.setblocking(False)
    address: tuple[str, int] = bound.getsockname()
    end_read, end_write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(end_read)
        bound.close()
        return pid, address, end_write
    os.close(end_write)

    async def run() -> None:
        relay = Relay(bound)
        relay.lead_to(path)
        await relay.start()
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(end_read, over.set)
        await over.wait()
        relay.close()

    asyncio.run(run())
    os._exit(0)


async def compare(streams: int, chunks_s: float, seconds: float, path: str) -> None:
    """Measure without and with the relay, and print both."""
    await source(path, streams / chunks_s)
    direct = await measure(path, streams, seconds)
    pid, address, end = relaying(path)
    while True:
        try:
            await measure(address, 1, 0.1)
            break
        except OSError:
            await asyncio.sleep(0.01)
    before_s = _cpu_s(pid)
    relayed = await measure(address, streams, seconds)
    used_s = _cpu_s(pid) - before_s
    os.close(end)
    await asyncio.to_thread(os.waitpid, pid, 0)
    rss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    rate = len(relayed) / seconds
    print(f"{streams} streams, {rate:.0f} chunks/s of {CHUNK_BYTES} bytes, {seconds:g} s")  # noqa: T201
    print(f"relay   {100 * used_s / seconds:.1f} % of a core, {rss:.0f} MiB")  # noqa: T201
    print("latency    median      p99")  # noqa: T201
    for name, found in (("direct", direct), ("relayed", relayed)):
        print(f"{name:8} {_ms(found, 50):7.2f} ms {_ms(found, 99):7.2f} ms")  # noqa: T201
    added = _ms(relayed, 50) - _ms(direct, 50)
    print(f"added    {added:7.2f} ms {_ms(relayed, 99) - _ms(direct, 99):7.2f} ms")  # noqa: T201


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ms(late_ns: list[int], percentile: int) -> float:
    return statistics.quantiles(late_ns, n=100)[percentile - 1] / 1e6


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--chunks-s", type=float, default=480.0, help="over all streams")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = compare(given.streams, given.chunks_s, given.seconds, f"{directory}/engine.sock")
        asyncio.run(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
