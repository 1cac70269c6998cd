"""A small SMTP server that mail is sent to in tests.

    with FakeSmtp() as server:
        ...  # 127.0.0.1:server.port; server.mails

It keeps what it took, with the sender and receivers of the envelope, and whether the connection was TLS then. `user`
and `password` make it ask for AUTH (PLAIN or LOGIN); `tls` is the certificate with which it offers STARTTLS, or speaks
TLS from the first byte (`is_tls`). `script()` gives answers in place of its own, by command:
`server.script(DATA="451 busy")` answers the next DATA so; `""` ends the connection, and `"slow"` says nothing until
the server is closed.
"""

from __future__ import annotations

import base64
import email
import email.policy
import socketserver
import ssl
import threading
from collections import defaultdict
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True)
class SeenMail:
    sender: str
    receivers: tuple[str, ...]
    raw: bytes
    is_encrypted: bool
    user: str | None

    @property
    def message(self) -> EmailMessage:
        return cast("EmailMessage", email.message_from_bytes(self.raw, policy=email.policy.default))

    @property
    def text(self) -> str:
        return self.message.get_content().replace("\r\n", "\n")


class FakeSmtp:
    """The server; a context manager. All methods may be called from any thread."""

    def __init__(
        self,
        *,
        user: str | None = None,
        password: str | None = None,
        tls: Path | None = None,
        is_tls: bool = False,
    ) -> None:
        """Args:
        user: Whom it lets in; None: everybody.
        password: That user's.
        tls: A file with a key and a certificate.
        is_tls: Whether TLS is spoken from the first byte; else STARTTLS is offered.
        """
        self.user, self.password = user, password
        self.is_tls = is_tls
        self.tls: ssl.SSLContext | None = None
        if tls is not None:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(tls)
        self.refused_receivers: set[str] = set()
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._mails: list[SeenMail] = []
        self._commands: list[str] = []
        self._script: defaultdict[str, list[str]] = defaultdict(list)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.fake = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="fake-smtp", daemon=True
        )

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def mails(self) -> list[SeenMail]:
        with self._lock:
            return list(self._mails)

    @property
    def commands(self) -> list[str]:
        """The words of all commands that came, in order."""
        with self._lock:
            return list(self._commands)

    def script(self, **answers: str) -> None:
        with self._lock:
            for word, answer in answers.items():
                self._script[word].append(answer)

    def note(self, word: str) -> str | None:
        """Keeps a command; gives the scripted answer to it, if there is one."""
        with self._lock:
            self._commands.append(word)
            return self._script[word].pop(0) if self._script[word] else None

    def keep(self, mail: SeenMail) -> None:
        with self._lock:
            self._mails.append(mail)

    def __enter__(self) -> FakeSmtp:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    fake: FakeSmtp

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are what the tests are about."""


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        fake = self.server.fake
        self.connection.settimeout(60)
        self._encrypted, self._user = False, cast("str | None", None)
        if fake.is_tls:
            self._encrypt()
        self._reset()
        self._say("220 fake ready")
        while True:
            line = self.rfile.readline()
            if not line:
                return
            text = line.decode("utf-8", "replace").strip()
            word, _, rest = text.partition(" ")
            word = word.upper()
            scripted = fake.note(word)
            if scripted == "":
                return
            if scripted == "slow":
                fake.closing.wait(60)
                return
            if scripted is not None:
                self._say(scripted)
                continue
            answer = getattr(self, f"_{word.lower()}", None)
            if answer is None:
                self._say("502 what?")
            elif answer(rest) is False:
                return

    def finish(self) -> None:
        super().finish()
        # Of a connection that was turned to TLS, the server knows the plain socket only.
        self.connection.close()

    def _reset(self) -> None:
        self._sender, self._receivers = "", list[str]()

    def _say(self, *lines: str) -> None:
        self.wfile.write("".join(f"{line}\r\n" for line in lines).encode())

    def _encrypt(self) -> None:
        assert self.server.fake.tls is not None
        self.connection = self.server.fake.tls.wrap_socket(self.connection, server_side=True)
        self.setup_files()
        self._encrypted = True

    def setup_files(self) -> None:
        self.rfile = self.connection.makefile("rb", -1)
        self.wfile = self.connection.makefile("wb", 0)

    def _ehlo(self, rest: str) -> None:
        fake = self.server.fake
        offers = ["8BITMIME"]
        if fake.tls is not None and not self._encrypted:
            offers.append("STARTTLS")
        if fake.user is not None:
            offers.append("AUTH PLAIN LOGIN")
        self._say("250-fake", *(f"250-{offer}" for offer in offers[:-1]), f"250 {offers[-1]}")

    def _starttls(self, rest: str) -> None:
        self._say("220 go ahead")
        self._encrypt()
        self._reset()

    def _auth(self, rest: str) -> None:
        fake = self.server.fake
        kind, _, first = rest.partition(" ")
        if kind.upper() == "PLAIN":
            _, user, password = base64.b64decode(first or self._asked("")).decode().split("\0")
        else:
            user = base64.b64decode(first or self._asked("Username:")).decode()
            password = base64.b64decode(self._asked("Password:")).decode()
        if (user, password) != (fake.user, fake.password):
            # As careless as servers are: what was sent stands in the answer.
            given = base64.b64encode(password.encode()).decode()
            self._say(f"535 5.7.8 no such login: {user} {password} {given}")
            return
        self._user = user
        self._say("235 welcome")

    def _asked(self, question: str) -> str:
        self._say("334 " + base64.b64encode(question.encode()).decode())
        return self.rfile.readline().decode().strip()

    def _mail(self, rest: str) -> None:
        if self.server.fake.user is not None and self._user is None:
            self._say("530 log in first")
            return
        self._sender = rest.partition(":")[2].partition(">")[0].strip().lstrip("<")
        self._say("250 ok")

    def _rcpt(self, rest: str) -> None:
        receiver = rest.partition(":")[2].partition(">")[0].strip().lstrip("<")
        if receiver in self.server.fake.refused_receivers:
            self._say("550 nobody here by that name")
            return
        self._receivers.append(receiver)
        self._say("250 ok")

    def _data(self, rest: str) -> bool:
        self._say("354 go on")
        lines: list[bytes] = []
        while True:
            line = self.rfile.readline()
            if not line:
                return False
            if line == b".\r\n":
                break
            lines.append(line.removeprefix(b"."))
        mail = SeenMail(self._sender, tuple(self._receivers), b"".join(lines), self._encrypted, self._user)
        self.server.fake.keep(mail)
        self._reset()
        self._say("250 taken")
        return True

    def _rset(self, rest: str) -> None:
        self._reset()
        self._say("250 ok")

    def _noop(self, rest: str) -> None:
        self._say("250 ok")

    def _quit(self, rest: str) -> bool:
        self._say("221 bye")
        return False
