"""The notifier `webhook`: a POST of JSON, signed.

The body is `{"type": "approval.<reason>", "id": notice id, "approval": {...}, "how_to_decide": [...]}`; the reasons are
those of `NoticeMessage`. Headers: `X-AgentMesh-Delivery`, the notice's id, the same in every attempt; and, where
the config has a secret, `X-AgentMesh-Signature: t=<unix seconds>,v1=<hex>`, the HMAC-SHA256 of `<t>.<body>` under that
secret, as Stripe signs its webhooks: a receiver refuses what is signed wrongly or long ago.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from agentmesh_dagster.deadline import DeadlinePassed, within
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.notify.base import Notifier, NotifyContext, NotifyError
from agentmesh_dagster.runtime.notify.message import NoticeMessage, one_line, shortened
from agentmesh_dagster.runtime.secrets import Redactor
from agentmesh_dagster.runtime.tools.http_client import HttpResponse
from agentmesh_dagster.runtime.tools.http_request import checked_headers, parse_url, port_of, render_url
from agentmesh_dagster.specs.notify import WebhookNotify

if TYPE_CHECKING:
    import httpx

__all__ = ["DELIVERY_HEADER", "SIGNATURE_HEADER", "WebhookNotifier", "sign"]

SIGNATURE_HEADER: Final = "X-AgentMesh-Signature"
DELIVERY_HEADER: Final = "X-AgentMesh-Delivery"
_OWN_HEADERS: Final = ("content-type", DELIVERY_HEADER.lower(), SIGNATURE_HEADER.lower())
# How much of the answer is read; a refusal's beginning is shown.
_MAX_ANSWER: Final = 10_000
_ANSWER_SHOWN: Final = 200


def sign(secret: str, body: bytes, at_s: int) -> str:
    """The value of the signature's header.

    Args:
        secret: The key that sender and receiver share.
        body: As sent.
        at_s: Unix seconds.
    """
    made = hmac.new(secret.encode("utf-8"), f"{at_s}.".encode("ascii") + body, hashlib.sha256)
    return f"t={at_s},v1={made.hexdigest()}"


class WebhookNotifier(Notifier[WebhookNotify]):
    """Posts the approval to a URL; any 2xx is success, and no redirect is followed."""

    name = "webhook"
    config_model = WebhookNotify

    def render(self, config: Mapping[str, Json], names: Mapping[str, object]) -> dict[str, Json]:
        """As the base class does, but for the URL.

        An approval shows what strangers and models wrote: in the URL it is encoded, as the input of a tool is.
        """
        rendered = super().render({k: v for k, v in config.items() if k != "url"}, names)
        if not isinstance(config.get("url"), str):
            return rendered
        return {**rendered, "url": render_url(config["url"], names, self._where("url"))}

    def destination(self, config: WebhookNotify) -> tuple[str, int]:
        url = parse_url(config.url, self._where("url"))
        return url.host, port_of(url)

    async def send(self, config: WebhookNotify, message: NoticeMessage, context: NotifyContext) -> None:
        """See the module.

        Raises:
            NotifyError: No 2xx came in time.
            ToolRefused: The URL or a header cannot be sent, or the address is not allowed.
        """
        url = parse_url(config.url, self._where("url"))
        body = _body(message)
        headers = [
            ("Content-Type", "application/json"),
            *_given_headers(config.headers),
            (DELIVERY_HEADER, message.id),
        ]
        if config.secret:
            headers.append(
                (SIGNATURE_HEADER, sign(config.secret, body, int(context.clock.now().timestamp())))
            )
        # The path is left out of errors: that of many services is itself the secret.
        shown = f"POST {url.scheme}://{url.netloc.decode('ascii')}"
        response = await self._answer(context, url, headers, body, config.timeout_s, shown)
        if 200 <= response.status < 300:
            return
        known = Redactor([*config.headers.values(), *url.path.split("/"), config.secret or ""])
        text = one_line(response.body.decode("utf-8", "replace"))
        answer = shortened(known.redact_text(context.secrets.redact(text)), _ANSWER_SHOWN)
        hint = " (redirects are not followed)" if 300 <= response.status < 400 else ""
        raise NotifyError(
            f"{shown} answered with status {response.status}{hint}{': ' if answer else ''}{answer}",
            context={"status": response.status},
        )

    async def _answer(
        self,
        context: NotifyContext,
        url: httpx.URL,
        headers: list[tuple[str, str]],
        body: bytes,
        timeout_s: float,
        shown: str,
    ) -> HttpResponse:
        import httpcore

        try:
            return await within(
                context.http.send("POST", url, headers, body, max_bytes=_MAX_ANSWER), timeout_s
            )
        except DeadlinePassed:
            problem = f"took longer than {timeout_s:g} s"
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            problem = f"got no answer: {str(error) or type(error).__name__}"
        raise NotifyError(f"{shown} {problem}")


def _body(message: NoticeMessage) -> bytes:
    content = {
        "type": f"approval.{message.reason}",
        "id": message.id,
        "approval": message.approval,
        "how_to_decide": list(message.how_to_decide),
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _given_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    where = "notify 'webhook', field headers"
    given = checked_headers(headers, where)
    names = [name.lower() for name, _ in given]
    for name in _OWN_HEADERS:
        if name in names:
            raise NotifyError(f"{where}: {name!r} is set by AgentMesh", code="notify-config")
    return given if "user-agent" in names else [*given, ("User-Agent", "agentmesh-dagster")]
