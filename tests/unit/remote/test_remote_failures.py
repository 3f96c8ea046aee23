"""A client of a server that refuses, fails, ends, or is not there: over real connections."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest

from blendrag import BlendragError, RemoteChat, errors
from blendrag.chat.tools import TemplateFacts
from blendrag.remote import chat as remote
from places import free_port
from scripted_server import MODEL, Reply, Script, error, events

HI = [{"role": "user", "content": "Hi"}]


def posted(server: Script) -> int:
    return sum(method == "POST" for method, *_ in server.asked)


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (error(401), errors.ServerRefusalError, "the key is missing: give api_key, or set BLENDRAG__API_KEY"),
        (error(403, "no right to ask"), errors.ServerRefusalError, "no right to ask"),
        (error(404, "The model `x` does not exist."), errors.ConfigError, "The model `x` does not exist"),
        (error(404, "Not Found"), errors.ServerNotFoundError, "is no server of blendrag"),
        (error(404), errors.ServerNotFoundError, "is no server of blendrag"),
        (error(413), errors.ServerRefusalError, "no request as large as this"),
        (error(400, "unknown field 'x' in blendrag"), errors.ConfigError, "unknown field 'x'"),
        (error(400, "This model's maximum context length is 9"), errors.PromptTooLongError, "length is 9"),
        (error(507, "the disk is full"), errors.StoreFullError, "the disk is full"),
        (error(500, "boom\n  boom"), errors.ServerError, "failed: boom boom"),
        (error(307, location="http://b:1/"), errors.ServerNotFoundError, "http://b:1/"),
        (Reply(200, ["<html>"], {"content-type": "text/html"}), errors.ServerNotFoundError, "no server of"),
    ],
)
def test_refusal_is_not_asked_again_and_takes_one_line(
    server: Script, chat: RemoteChat, reply: Reply, kind: type[BlendragError], said: str
) -> None:
    server.replies = [reply]
    with pytest.raises(kind, match=said) as caught:
        chat.complete(chat.request(HI, max_retries=3))
    assert "\n" not in str(caught.value)
    assert posted(server) == 1


def test_server_without_blendrag_is_refused(server: Script, chat: RemoteChat) -> None:
    plain = events("Hello")
    del plain.headers["x-blendrag"]
    server.replies = [plain]
    with pytest.raises(errors.ServerNotFoundError, match="blendrag serve"):
        chat.complete(chat.request(HI))


def test_wrong_key_is_sent_without_the_line_end_of_its_file_and_not_shown(server: Script) -> None:
    server.replies = [error(401)]
    chat = RemoteChat(server.url.replace("//", "//me:hidden@"), "s3cret\n")
    with pytest.raises(errors.ServerRefusalError, match="the key is wrong") as caught:
        chat.complete(chat.request(HI))
    assert "s3cret" not in repr(vars(chat)) + str(caught.value)
    assert "hidden" not in str(caught.value)
    assert set(server.keys) == {"Bearer s3cret"}


@pytest.mark.parametrize("key", ["s3cret\r\nx: y", "s3crét", "s3cret\0"])
def test_key_that_is_no_header_is_refused_and_not_shown(key: str) -> None:
    for given in ({"api_key": key}, {"http": {"headers": {"x-own": key}}}):
        with pytest.raises(errors.ConfigError, match="api_key, or a header") as caught:
            RemoteChat("http://localhost:8000", **given)
        assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize(
    "reply",
    [error(503, "queue full"), events("a", cut=True, done=False), error(502), Reply(lines=["x"], cut=True)],
    ids=["busy", "cut", "proxy", "garbled"],
)
async def test_failure_before_the_first_token_is_asked_again(
    server: Script, chat: RemoteChat, reply: Reply
) -> None:
    if reply.lines and len(reply.lines) > 1:
        reply.lines = reply.lines[:1]  # the role only
    server.replies = [reply, events("fine")] * 2
    if "content-type" not in reply.headers:
        reply.headers |= {"content-type": "text/event-stream", "x-blendrag": "{}"}
    assert chat.complete(chat.request(HI, max_retries=1)).text == "fine"
    assert (await chat.acomplete(chat.request(HI, max_retries=1))).text == "fine"
    server.replies = [reply]
    with pytest.raises(errors.ServerBusyError):
        chat.complete(chat.request(HI, max_retries=0))


def test_busy_server_is_asked_when_it_says(
    server: Script, chat: RemoteChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    server.replies = [error(503, "full", retry_after="3"), events("fine")]
    assert chat.complete(chat.request(HI)).text == "fine"
    assert 3.0 in slept
    server.replies = [error(503, "full", retry_after="3600")]
    with pytest.raises(errors.ServerBusyError, match="in 3600 s"):
        chat.complete(chat.request(HI))


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        ("0.5", 0.5),
        ("3", 3),
        ("-1", 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("in an hour", pytest.approx(3600, abs=60)),
        ("soon", None),
        ("", None),
    ],
)
def test_time_to_come_again_is_a_number_or_a_date(
    server: Script, chat: RemoteChat, after: str, seconds: float | None
) -> None:
    after = formatdate(time.time() + 3600, usegmt=True) if after == "in an hour" else after
    server.replies = [error(429, retry_after=after)]
    with pytest.raises(errors.ServerBusyError) as caught:
        chat.complete(chat.request(HI, max_retries=0))
    assert caught.value.retry_after_s == seconds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Bad Request"),
        ("<html>\n<title>400 Bad</title><hr>nginx</html>", "400 Bad"),
        ('{"message": "missing\\ntoken"}', "missing"),
        ('{"errors": [{"message": "no plan"}, 3]}', "no plan"),
        ('{"errors": ["no plan"]}', "no plan"),
        ('{"error": {}}', "Bad Request"),
        ("[]", "Bad Request"),
    ],
)
def test_refusal_of_a_gateway_is_told_in_its_words(
    server: Script, chat: RemoteChat, text: str, said: str
) -> None:
    server.replies = [Reply(400, [text])]
    with pytest.raises(errors.ConfigError, match=f"refuses this: {said}$"):
        chat.complete(chat.request(HI))


@pytest.mark.parametrize("cut", [True, False])
async def test_answer_that_broke_off_is_neither_begun_anew_nor_taken_for_whole(
    server: Script, chat: RemoteChat, cut: bool
) -> None:
    reply = events("It is", done=False, cut=cut)
    server.replies = [reply, events("no"), reply]
    given = []
    with pytest.raises(errors.BrokenAnswerError, match=r"broke off|ended the stream"):
        for piece in chat.stream(chat.request(HI, max_retries=5)):
            given.append(piece.text)
    assert given == ["It is"]
    assert posted(server) == 1
    server.replies = [reply]
    with pytest.raises(errors.BrokenAnswerError):
        await chat.acomplete(chat.request(HI, max_retries=5))


def test_error_within_a_stream_is_not_taken_for_its_end(server: Script, chat: RemoteChat) -> None:
    failed = 'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n'
    reply = events("It is", done=False)
    reply.lines.append(failed)
    server.replies = [reply]
    with pytest.raises(errors.BrokenAnswerError, match="engine died"):
        chat.complete(chat.request(HI))


def test_closed_port_is_an_error_of_one_line(server: Script) -> None:
    chat = RemoteChat(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(errors.ServerNotFoundError, match="no server answers at http") as caught:
        chat.complete(chat.request(HI))
    assert "\n" not in str(caught.value)


def test_server_that_starts_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BETWEEN_ATTEMPTS_S", 0.3)
    port = free_port()

    def serve() -> None:
        time.sleep(0.15)
        with socket.create_server(("127.0.0.1", port)) as late:
            for reply in (Reply(lines=[json.dumps(MODEL)]), events("fine")):
                connection, _ = late.accept()
                with connection:
                    connection.recv(65536)
                    lines = "".join(reply.lines).encode()
                    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-blendrag: {}\r\n"
                    end = f"connection: close\r\ncontent-length: {len(lines)}\r\n\r\n"
                    connection.sendall((head + end).encode() + lines)

    thread = threading.Thread(target=serve)
    thread.start()
    chat = RemoteChat(f"http://127.0.0.1:{port}/v1/")
    assert chat.complete(chat.request(HI)).text == "fine"
    thread.join()


def test_silent_server_is_waited_for_no_longer_than_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        chat = RemoteChat(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(errors.GenerationTimeoutError, match=r"0\.2 s"):
            chat.complete(chat.request(HI, timeout=0.2))


@contextlib.contextmanager
def held_open(told: str) -> Iterator[RemoteChat]:
    """A client of what answers with this, and then with comments that do not end."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-blendrag: {}\r\n\r\n"
            connection.sendall((head + told).encode())
            for _ in range(100):
                time.sleep(0.05)
                connection.sendall(b": alive\n\n")

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    with listening:
        chat = RemoteChat(f"http://127.0.0.1:{listening.getsockname()[1]}")
        chat._known = remote._ModelFacts("served", 512, TemplateFacts(**MODEL["template"]), "")
        yield chat


async def test_answer_that_has_ended_is_not_waited_for() -> None:
    with held_open("".join(events("fine").lines)) as chat:
        begin = time.perf_counter()
        assert chat.complete(chat.request(HI, max_retries=0)).text == "fine"
        assert (await chat.acomplete(chat.request(HI, max_retries=0))).text == "fine"
        assert time.perf_counter() - begin < 2


async def test_comments_of_a_proxy_do_not_prolong_what_an_answer_may_take() -> None:
    with held_open(events("fi").lines[0]) as chat:
        for _ in range(2):
            with pytest.raises(errors.GenerationTimeoutError, match=r"0\.3 s"):
                chat.complete(chat.request(HI, timeout=0.3))
            with pytest.raises(errors.GenerationTimeoutError, match=r"0\.3 s"):
                await chat.acomplete(chat.request(HI, timeout=0.3))


async def test_connection_that_ends_with_its_answer_is_used_again(server: Script, chat: RemoteChat) -> None:
    server.replies = [events("fine")] * 4
    for _ in range(2):
        chat.complete(chat.request(HI))
        await chat.acomplete(chat.request(HI))
    (loops,) = chat.server._clients.values()
    for client in (chat.server._sync(), loops):
        (connection,) = client._transport._pool.connections
        assert connection.is_idle()


def test_end_of_the_process_does_not_wait_for_prefetches() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for number in range(20):
            RemoteChat(url).prefetch([str(number)])
        background = remote._background(os.getpid())
        assert len(background._latest) <= remote._PREFETCHES
        (thread,) = [one for one in threading.enumerate() if one.name == "blendrag-prefetch"]
        assert thread.daemon
        background._latest.clear()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "", "http://", 7])
def test_wrong_url_is_refused(url: Any) -> None:
    with pytest.raises(errors.ConfigError, match="base_url"):
        RemoteChat(url)
