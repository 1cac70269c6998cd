"""The notifier `email`: one plain-text message by SMTP, the same `Message-ID` in every attempt."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import replace
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime, getaddresses
from functools import partial
from typing import TYPE_CHECKING, Final

from agentmesh_dagster.deadline import DeadlinePassed, within
from agentmesh_dagster.deployment import WHERE, MailServer
from agentmesh_dagster.runtime.functions import run_in_thread
from agentmesh_dagster.runtime.notify.base import Notifier, NotifyContext, NotifyError
from agentmesh_dagster.runtime.notify.message import NoticeMessage, one_line, shortened
from agentmesh_dagster.runtime.secrets import Secrets
from agentmesh_dagster.specs.expressions import render
from agentmesh_dagster.specs.notify import EmailNotify

if TYPE_CHECKING:
    import smtplib
    from datetime import datetime

__all__ = ["EmailNotifier", "build_mail"]

_MAX_SUBJECT: Final = 200


class EmailNotifier(Notifier[EmailNotify]):
    """Sends through the SMTP server of the deployment."""

    name = "email"
    config_model = EmailNotify

    async def send(self, config: EmailNotify, message: NoticeMessage, context: NotifyContext) -> None:
        """Sends to all receivers at once; those that the server refuses beside others are named in the log.

        Raises:
            NotifyError: The deployment has no mail server (code `mail-unconfigured`), the message cannot be made, or
                the server did not take it in time.
        """
        if context.mail is None:
            raise NotifyError(
                f"the deployment has no mail server: say which by mail=MailServer(host=...) of {WHERE}",
                code="mail-unconfigured",
            )
        server = _with_login(context.mail, context.secrets)
        mail = build_mail(config, message, context.clock.now(), server.sender)
        session = _Session(server, config.timeout_s)
        try:
            refused: Sequence[str] = await within(
                run_in_thread(partial(session.send, mail)), config.timeout_s
            )
        except DeadlinePassed:
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
        raise NotifyError(f"the SMTP server {server.host}:{server.port} {problem}")


def _with_login(server: MailServer, secrets: Secrets) -> MailServer:
    """The server with user and password in clear."""
    names, where = {"secret": secrets.of_deployment}, "mail server of the deployment"
    user: str | None = None if server.user is None else render(server.user, names, where=where)
    password: str | None = None if server.password is None else render(server.password, names, where=where)
    secrets.remember(*filter(None, (password,)))
    return replace(server, user=user, password=password)


def build_mail(
    config: EmailNotify, message: NoticeMessage, at: datetime, default_sender: str | None = None
) -> EmailMessage:
    """The message; what comes from an approval cannot add a header or a receiver.

    Args:
        config: Rendered.
        message: What it says.
        at: Its date.
        default_sender: Whom it comes from, where the config does not say.

    Raises:
        NotifyError: An address is none, or there is no sender (code `notify-config`).
    """
    mail = EmailMessage()
    sender = _address(config.sender or default_sender or "", "sender")
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

    def __init__(self, server: MailServer, timeout_s: float) -> None:
        self._to = server
        self._timeout_s = timeout_s
        self._server: smtplib.SMTP | None = None
        self._is_abandoned = False

    def send(self, mail: EmailMessage) -> list[str]:
        """The receivers that the server refused while it took the message for others.

        Raises:
            NotifyError: It took it for none.
        """
        import smtplib

        try:
            return self._send(mail)
        except smtplib.SMTPAuthenticationError as error:
            problem = f"refused the login with status {error.smtp_code}"
        except smtplib.SMTPResponseException as error:
            problem = f"refused the message with status {error.smtp_code}"
        except smtplib.SMTPRecipientsRefused as error:
            codes = ", ".join(
                f"{receiver} with status {answer[0]}" for receiver, answer in error.recipients.items()
            )
            problem = f"refused all receivers: {codes}"
        except smtplib.SMTPNotSupportedError:
            problem = "offers no STARTTLS, or not what else is asked of it"
        except smtplib.SMTPException as error:
            problem = f"failed: {type(error).__name__}"
        except (OSError, ValueError) as error:
            # ValueError: TLS was asked of an address without a name, or a text cannot be sent.
            problem = f"cannot be reached: {_reason(error)}"
        # What the server answered is not shown: whose it is, the deployment knows, and who reads this may not.
        raise NotifyError(
            f"the SMTP server {self._to.host}:{self._to.port} {shortened(one_line(problem), 300)}"
        )

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

        to = self._to
        if to.tls:
            server = smtplib.SMTP_SSL(
                to.host, to.port, timeout=self._timeout_s, context=ssl.create_default_context()
            )
        else:
            server = smtplib.SMTP(to.host, to.port, timeout=self._timeout_s)
        self._server = server
        with server:
            if to.starttls and not to.tls:
                server.starttls(context=ssl.create_default_context())
            if to.user is not None and to.password is not None:
                server.login(to.user, to.password)
            if self._is_abandoned:
                raise OSError("it took too long")
            return sorted(server.send_message(mail))


def _reason(error: OSError | ValueError) -> str:
    """Why there was no connection, in the words of this machine and in none of the server's."""
    if isinstance(error, OSError):
        # OpenSSL's word, such as CERTIFICATE_VERIFY_FAILED.
        return str(getattr(error, "reason", None) or error.strerror or type(error).__name__)
    return type(error).__name__
