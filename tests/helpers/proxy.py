"""A TCP proxy that makes a healthy server slow, silent or mad, in a thread of its own or as a process:

    python proxy.py --to 127.0.0.1:6379 --rate 100e6 --delay 0.005

prints the port it listens on, and then takes lines such as "mode hang" or "rate 2e8" from its standard input.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import Literal

Mode = Literal["pass", "hang", "refuse", "cut", "garbage"]

_SLICE = 256 << 10  # bytes taken at once
_SHORT = 0.0005  # seconds' worth of bytes are taken at once when there is a limit: it holds at any moment
_CATCH_UP = 0.002  # seconds that a sleep that lasted too long may be made up for


class Proxy:
    """Listens on ``port`` of localhost for what is meant for ``to``. These may change at any time:

    rate: bytes per second, of all connections and both directions together; None: no limit.
    delay_s: how long a request is kept before it is passed on; what follows at once is not kept again.
    mode: "pass": as if it were not there. "hang": connections are accepted, nothing is passed on. "refuse":
        none is accepted, and those that exist are reset. "cut": a connection ends after ``cut_after`` bytes
        of answers. "garbage": answers are other bytes.
    """

    def __init__(self, to: tuple[str, int], *, rate: float | None = None, delay_s: float = 0.0) -> None:
        self.to, self.rate, self.delay_s, self.cut_after = to, rate, delay_s, 1000
        self._mode: Mode = "pass"
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._free = 0.0  # when what was let through so far is through
        self._listener: socket.socket | None = None
        self.port = 0
        self._listen()

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = mode
        if mode == "refuse":
            self.close()
        elif self._listener is None:
            self._listen()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and reset every connection."""
        with self._lock:
            listener, self._listener = self._listener, None
            pairs, self._pairs = self._pairs, set()
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        for pair in pairs:
            _reset(*pair)

    def _listen(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.to, timeout=10)
        except OSError:
            _reset(client)
            return
        server.settimeout(None)
        pair = client, server
        for one in pair:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._pairs.add(pair)
        threads = [
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True),
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self._lock:
            self._pairs.discard(pair)
        client.close()
        server.close()

    def _wait_for(self, nbytes: int) -> None:
        """Wait until so many bytes may pass."""
        if not (rate := self.rate):
            return
        with self._lock:
            self._free = max(self._free, time.perf_counter() - _CATCH_UP) + nbytes / rate
            wait = self._free - time.perf_counter()
        if wait > 0:
            time.sleep(wait)

    def _slice(self) -> int:
        return min(_SLICE, max(64, int(rate * _SHORT))) if (rate := self.rate) else _SLICE

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        buffer = memoryview(bytearray(_SLICE))
        passed = 0
        try:
            while True:
                idle = time.perf_counter()
                nbytes = source.recv_into(buffer[: self._slice()])
                if not nbytes:
                    break
                data = buffer[:nbytes]
                if not answers and self.delay_s and time.perf_counter() - idle > 1e-4:
                    time.sleep(self.delay_s)
                while self._mode == "hang":
                    time.sleep(0.01)
                if self._mode == "refuse":
                    break
                if answers and self._mode == "garbage":
                    data[:] = os.urandom(nbytes)
                if answers and self._mode == "cut" and passed + nbytes >= self.cut_after:
                    sink.sendall(data[: max(0, self.cut_after - passed)])
                    break
                self._wait_for(nbytes)
                sink.sendall(data)
                passed += nbytes
        except OSError:
            pass
        for one in (source, sink):  # one direction's end is the connection's end
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _reset(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.shutdown(socket.SHUT_RDWR)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", required=True, help="host:port")
    parser.add_argument("--rate", type=float, help="bytes per second")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds")
    options = parser.parse_args()
    host, _, port = options.to.rpartition(":")
    with Proxy((host, int(port)), rate=options.rate, delay_s=options.delay) as proxy:
        print(proxy.port, flush=True)
        for line in sys.stdin:
            name, value = line.split()
            if name == "mode":
                proxy.mode = value  # type: ignore[assignment]
            else:
                setattr(proxy, name, float(value) or None if name == "rate" else float(value))
            print("ok", flush=True)


if __name__ == "__main__":
    main()
