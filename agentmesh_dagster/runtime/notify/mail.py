"""The notifier `email`: one plain-text message by SMTP, the same `Message-ID` in every attempt."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime, getaddresses
from functools import partial
from typing import TYPE_CHECKING, Final

from agentmesh_dagster.runtime.functions import run_in_thread
from agentmesh_dagster.runtime.notify.base import Notifier, NotifyContext, NotifyError
from agentmesh_dagster.runtime.notify.message import NoticeMessage, one_line, shortened
from agentmesh_dagster.specs.notify import EmailNotify

if TYPE_CHECKING:
    import smtplib
    from datetime import datetime

__all__ = ["EmailNotifier", "build_mail"]

_MAX_SUBJECT: Final = 200


class EmailNotifier(Notifier[EmailNotify]):
    """Sends through the SMTP server that the config names."""

    name = "email"
    config_model = EmailNotify

    async def send(self, config: EmailNotify, message: NoticeMessage, context: NotifyContext) -> None:
        """Sends to all receivers at once; those that the server refuses beside others are named in the log.

        Raises:
            NotifyError: The message cannot be made, or the server did not take it in time.
        """
        mail = build_mail(config, message, context.clock.now())
        session = _Session(config)
        try:
            refused: Sequence[str] = await asyncio.wait_for(
                run_in_thread(partial(session.send, mail)), config.timeout_s
            )
        except asyncio.TimeoutError:
            problem = f"took longer than {config.timeout_s:g} s"
        else:
            if refused:
                context.say(
                    "warning",
                    f"notice {message.id} was not taken for {', '.join(refused)}; for others it was",
                )
            return
        finally:
            # Canceled or late: the thread must not send what is tried again.
            session.abandon()
        raise NotifyError(f"the SMTP server {config.host}:{config.port} {problem}")


def build_mail(config: EmailNotify, message: NoticeMessage, at: datetime) -> EmailMessage:
    """The message; what comes from an approval cannot add a header or a receiver.

    Args:
        config: Rendered.
        message: What it says.
        at: Its date.

    Raises:
        NotifyError: An address is none (code `notify-config`).
    """
    mail = EmailMessage()
    sender = _address(config.sender, "sender")
    receivers = [config.to] if isinstance(config.to, str) else config.to
    mail["From"] = sender
    mail["To"] = tuple(_address(text, "to") for text in receivers)
    mail["Subject"] = shortened(one_line(config.subject or "") or message.subject, _MAX_SUBJECT)
    mail["Date"] = format_datetime(at)
    mail["Message-ID"] = f"<{message.id}@{sender.domain}>"
    # No out-of-office answers (RFC 3834).
    mail["Auto-Submitted"] = "auto-generated"
    mail["X-AgentMesh-Delivery"] = message.id
    # Lone surrogates, which JSON may hold, are no text that can be sent.
    mail.set_content(message.text.encode("utf-8", "replace").decode("utf-8"))
    return mail


def _address(text: str, field: str) -> Address:
    """One address, with or without a name: `Ann <ann@example.com>`."""
    found = getaddresses([text]) if text.isprintable() else []
    if len(found) == 1 and found[0][1].count("@") == 1 and " " not in found[0][1]:
        name, spec = found[0]
        with contextlib.suppress(MessageError, ValueError, IndexError):
            return Address(display_name=name, addr_spec=spec)
    raise NotifyError(
        f"notify 'email', field {field}: {shortened(one_line(text), 100)!r} is not one address such as "
        "'ann@example.com'",
        code="notify-config",
    )


class _Session:
    """One conversation with a server, in a thread of its own."""

    def __init__(self, config: EmailNotify) -> None:
        self._config = config
        self._server: smtplib.SMTP | None = None
        self._is_abandoned = False

    def send(self, mail: EmailMessage) -> list[str]:
        """The receivers that the server refused while it took the message for others.

        Raises:
            NotifyError: It took it for none.
        """
        import smtplib

        where = f"the SMTP server {self._config.host}:{self._config.port}"
        try:
            return self._send(mail)
        except smtplib.SMTPResponseException as error:
            answer = error.smtp_error
            text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer)
            doing = "refused the login" if isinstance(error, smtplib.SMTPAuthenticationError) else "refused"
            problem = f"{doing}: {error.smtp_code} {text}"
        except smtplib.SMTPRecipientsRefused as error:
            problem = f"refused all receivers: {error.recipients}"
        except smtplib.SMTPException as error:
            problem = f"failed: {error}"
        except (OSError, ValueError) as error:
            # ValueError: TLS was asked of an address without a name, or a text cannot be sent.
            problem = f"cannot be reached: {error}"
        raise NotifyError(f"{where} {shortened(one_line(problem), 300)}")

    def abandon(self) -> None:
        """Breaks the connection, if there is one still."""
        self._is_abandoned = True
        sock = self._server.sock if self._server is not None else None
        if isinstance(sock, socket.socket):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _send(self, mail: EmailMessage) -> list[str]:
        import smtplib
        import ssl

        config = self._config
        if config.tls:
            server = smtplib.SMTP_SSL(
                config.host, config.port, timeout=config.timeout_s, context=ssl.create_default_context()
            )
        else:
            server = smtplib.SMTP(config.host, config.port, timeout=config.timeout_s)
        self._server = server
        with server:
            if config.starttls and not config.tls:
                server.starttls(context=ssl.create_default_context())
            if config.user is not None and config.password is not None:
                server.login(config.user, config.password)
            if self._is_abandoned:
                raise OSError("it took too long")
            return sorted(server.send_message(mail))
