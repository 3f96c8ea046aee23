"""An S3 server over HTTP for the tests: ``python s3_server.py FOLDER PORT`` serves buckets that are folders.

Written for them: servers that come as packages are slower than the tiers that are tested. It does not check
signatures.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class S3Handler(BaseHTTPRequestHandler):
    """The part of S3 that object tiers use: PUT, ranged and conditional GET, HEAD, DELETE, DeleteObjects."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder = Path()

    def do_GET(self) -> None:
        try:
            file = self._file().open("rb")
        except OSError:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        with file:
            status = os.fstat(file.fileno())
            etag = f'"{status.st_mtime_ns:x}-{status.st_ino:x}"'
            if self.headers.get("If-Match", etag) != etag:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            begin, end, size = 0, status.st_size, status.st_size
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                begin, end = int(wanted[1]), min(int(wanted[2]) + 1, size)
                if begin >= size:
                    self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
                    return
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - begin))
            self.send_header("ETag", etag)
            self.send_header("Last-Modified", self.date_time_string(status.st_mtime))
            self.end_headers()
            if self.command == "GET" and end > begin:
                self.connection.sendfile(file, begin, end - begin)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        path = self._file()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{threading.get_ident()}.tmp")
        left = int(self.headers["Content-Length"])
        with temporary.open("wb") as file:
            while left:
                data = self.rfile.read(min(left, 1 << 20))
                if not data:
                    temporary.unlink()
                    return
                file.write(data)
                left -= len(data)
        temporary.replace(path)
        self._answer(200, headers={"ETag": '"new"'})

    def do_DELETE(self) -> None:
        self._file().unlink(missing_ok=True)
        self._answer(204)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall(r"<Key>(.*?)</Key>", asked)
        for key in keys:
            (self._file() / key).unlink(missing_ok=True)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _file(self) -> Path:
        return self.folder / unquote(urlsplit(self.path).path).lstrip("/")

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    S3Handler.folder = Path(sys.argv[1])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), S3Handler).serve_forever()
