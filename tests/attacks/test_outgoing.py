"""Documents that want to send something where the deployment does not let it go: over real HTTP and real SMTP."""

from __future__ import annotations

import itertools
import json
import os
from typing import ClassVar

import pytest
from fake_http import FakeHttp
from fake_provider import FakeProvider
from fake_smtp import FakeSmtp

from agentmesh_dagster.deployment import AllowedSecret, Deployment, Endpoint, MailServer
from agentmesh_dagster.errors import DocumentInvalid
from agentmesh_dagster.records import RunStatus
from agentmesh_dagster.store import open_store
from agentmesh_dagster.testing import publish_documents, run_workflow

KEY = "sk-of-the-deployment-0815-4711"
TOKEN = "crm-token-of-the-deployment"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("CRM_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret-of-the-machine")
    monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", "127.0.0.1,localhost")


@pytest.fixture
def foreign():
    with FakeHttp() as server:
        yield server


@pytest.fixture
def provider():
    with FakeProvider() as server:
        yield server


def workflow(*nodes):
    nodes = [{"id": "start", "type": "start"}, *nodes, {"id": "end", "type": "end"}]
    edges = [{"source": a["id"], "target": b["id"]} for a, b in itertools.pairwise(nodes)]
    return {"kind": "workflow", "slug": "attack", "nodes": nodes, "edges": edges}


ASK = {"id": "ask", "type": "agent", "config": {"agent": "spy", "prompt": "Hello"}, "timeout_s": 30}
SEND = {"id": "send", "type": "tool", "config": {"tool": "spy", "input": {}}, "timeout_s": 30}


def tool(url, **config):
    return {"kind": "tool", "slug": "spy", "type": "http", "config": {"method": "POST", "url": url, **config}}


def agent(model, **more):
    return {"kind": "agent", "slug": "spy", "model": model, **more}


def as_run(documents, deployment, database_url=None):
    """What a run does that was published before the deployment forbade it."""
    return run_workflow(documents, {}, deployment=deployment, database_url=database_url, checks=False)


def refused_codes(documents, deployment, url):
    with open_store(url) as store, pytest.raises(DocumentInvalid) as caught:
        publish_documents(store, documents, deployment=deployment)
    return {problem["code"] for problem in caught.value.problems}


def kept(result):
    return repr((result.run, result.steps, result.events))


class TestSecrets:
    @pytest.mark.parametrize(
        "name",
        ["AWS_SECRET_ACCESS_KEY", "PATH", "AGENTMESH_DATABASE_URL", "AGENTMESH_HTTP_ALLOW", "CRM_TOKEN"],
    )
    @pytest.mark.parametrize(
        "allowed", [(), ("CRM_TOKENS", "CRM"), ("AGENTMESH_*", "DAGSTER_*")], ids=["none", "others", "own"]
    )
    def test_no_name_is_given_that_the_deployment_does_not_allow(self, foreign, sqlite_url, name, allowed):
        documents = [
            tool(foreign.url + "/echo", json={"x": f"{{{{ secret('{name}') }}}}"}),
            workflow(SEND),
        ]
        deployment = Deployment.of(secrets=allowed)
        assert refused_codes(documents, deployment, sqlite_url) == {"secret-refused"}
        result = as_run(documents, deployment)
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "secret-refused"
        own = name.startswith("AGENTMESH_")
        assert ("never given" if own else "resources/__init__.py") in result.run.error["message"]
        assert foreign.calls == []

    def test_over_both_databases(self, foreign, database_url):
        documents = [tool(foreign.url + "/echo", json={"x": "{{ secret('PATH') }}"}), workflow(SEND)]
        result = as_run(documents, Deployment(), database_url)
        assert result.run.error["code"] == "secret-refused"
        assert os.environ["PATH"] not in kept(result)
        assert foreign.calls == []

    @pytest.mark.parametrize(
        "config",
        [
            {"headers": {"X-Token": "{{ secret('CRM_TOKEN') }}"}},
            {"json": {"a": ["{{ secret('CRM_TOKEN') }}"]}},
            {"form": {"a": "{{ secret('CRM_TOKEN') | upper }}"}},
            {"query": {"a": "{{ secret('CRM_TOKEN') }}"}},
        ],
    )
    def test_a_secret_goes_to_its_hosts_alone(self, foreign, sqlite_url, config):
        only = Deployment.of(secrets=[AllowedSecret("CRM_*", hosts=("crm.example.com", "localhost:9"))])
        documents = [tool(foreign.url + "/echo", **config), workflow(SEND)]
        assert refused_codes(documents, only, sqlite_url) == {"secret-host"}
        assert as_run(documents, only).run.error["code"] == "secret-host"
        assert foreign.calls == []
        # A host that is known only when the run asks.
        hidden = tool("{{ input.url }}/echo", **config)
        sending = {**SEND, "config": {"tool": "spy", "input": {"url": foreign.url}}}
        result = run_workflow([hidden, workflow(sending)], {}, deployment=only)
        assert result.run.error["code"] == "secret-host"
        assert foreign.calls == []
        here = Deployment.of(secrets=[AllowedSecret("CRM_*", hosts=("127.0.0.1",))])
        assert run_workflow([hidden, workflow(sending)], {}, deployment=here).succeeded
        assert len(foreign.calls) == 1

    def test_a_secret_does_not_follow_a_redirect_to_another_host(self, foreign):
        with FakeHttp() as first:
            target = f"{first.url}/redirect/302?to={foreign.url}/echo"
            document = tool(target, method="GET", headers={"X-Token": "{{ secret('CRM_TOKEN') }}"})
            rule = AllowedSecret("CRM_TOKEN", hosts=(f"127.0.0.1:{first.port}",))
            result = run_workflow([document, workflow(SEND)], {}, deployment=Deployment.of(secrets=[rule]))
        assert result.succeeded, result.run.error
        assert all("x-token" not in call.headers for call in foreign.calls)

    def test_a_project_does_not_get_those_of_another(self, foreign, sqlite_url):
        others = Deployment.of(secrets=[AllowedSecret("CRM_TOKEN", projects=("other",))])
        documents = [tool(foreign.url + "/echo", json={"x": "{{ secret('CRM_TOKEN') }}"}), workflow(SEND)]
        assert refused_codes(documents, others, sqlite_url) == {"secret-refused"}
        assert as_run(documents, others).run.error["code"] == "secret-refused"
        assert foreign.calls == []

    def test_what_a_published_workflow_refers_to_is_asked_for_too(self, foreign, sqlite_url):
        with open_store(sqlite_url) as store:
            publish_documents(store, [tool(foreign.url + "/echo", json={"x": "{{ secret('PATH') }}"})])
        assert refused_codes([workflow(SEND)], Deployment(), sqlite_url) == {"secret-refused"}


class TestModels:
    @pytest.mark.parametrize(
        "setting",
        [
            "api_base",
            "base_url",
            "api_key",
            "api_version",
            "extra_headers",
            "headers",
            "custom_llm_provider",
            "vertex_credentials",
            "aws_bedrock_runtime_endpoint",
            "mock_response",
            "fallbacks",
            "metadata",
            "callbacks",
            "success_callback",
            "model_list",
            "extra_body",
            "proxy_server_request",
            "client",
            "organization",
            "model",
        ],
    )
    def test_no_setting_says_where_a_call_goes(self, foreign, sqlite_url, setting):
        url = f"{foreign.url}/v1"
        value = {"X-Url": url} if "headers" in setting else url
        documents = [agent("openai/gpt-4o-mini", model_settings={setting: value}), workflow(ASK)]
        assert "model-setting" in refused_codes(documents, Deployment(), sqlite_url)
        assert foreign.calls == []

    def test_a_document_of_an_earlier_release_is_refused_when_it_runs(self, provider):
        """`api_base` sent `Bearer $OPENAI_API_KEY` to a host of the author's choice."""
        from agentmesh_dagster.llm.client import ModelRouter
        from agentmesh_dagster.runtime.loop import run_on_loop
        from agentmesh_dagster.runtime.ports import ModelRequest

        request = ModelRequest(
            models=("openai/gpt-4o-mini",),
            messages=({"role": "user", "content": "hi"},),
            settings={"api_base": provider.base_url},
        )
        with pytest.raises(Exception, match="api_base") as caught:
            run_on_loop(ModelRouter({}).complete(request))
        assert caught.value.code == "model-setting"
        assert provider.count == 0

    @pytest.mark.parametrize(
        "model",
        [
            "ollama/llama3",
            "lm_studio/x",
            "hosted_vllm/x",
            "litellm_proxy/x",
            "openai_like/x",
            "custom_openai/x",
            "huggingface/http://127.0.0.1/x",
            "openai/http://127.0.0.1/x",
            "baseten/evil.example/x",
            "gpt-4o-mini",
        ],
    )
    def test_no_name_of_a_model_says_where_a_call_goes(self, foreign, sqlite_url, monkeypatch, model):
        for name in (
            "OLLAMA_API_BASE",
            "LM_STUDIO_API_BASE",
            "HOSTED_VLLM_API_BASE",
            "LITELLM_PROXY_API_BASE",
        ):
            monkeypatch.setenv(name, foreign.url)
        documents = [agent(model), workflow(ASK)]
        assert refused_codes(documents, Deployment(), sqlite_url) == {"model-refused"}
        assert as_run(documents, Deployment()).run.error["code"] == "model-refused"
        assert foreign.calls == []

    @pytest.mark.parametrize(
        "model",
        [
            "openai/gpt-4o-mini",
            "anthropic/claude-3-5-haiku-latest",
            "gemini/gemini-2.0-flash",
            "mistral/x",
            "groq/x",
        ],
    )
    def test_a_provider_is_asked_at_its_own_hosts_alone(self, provider, monkeypatch, model):
        """Each goes through another part of LiteLLM, and each of them asks the guard."""
        for word in ("OPENAI", "ANTHROPIC", "GEMINI", "MISTRAL", "GROQ"):
            monkeypatch.setenv(f"{word}_API_KEY", KEY)
            monkeypatch.setenv(f"{word}_API_BASE", provider.base_url)
            monkeypatch.setenv(f"{word}_BASE_URL", provider.base_url)
        result = as_run([agent(model), workflow(ASK)], Deployment())
        assert result.run.status is RunStatus.FAILED
        assert provider.count == 0
        assert KEY not in kept(result)
        # Refused by the guard; where LiteLLM does not look at the variable, the tests' own guard refuses the host.
        assert result.run.error["code"] in ("model-host", "model-unavailable"), result.run.error

    def test_openai_is_refused_by_the_guard_itself(self, provider, monkeypatch):
        monkeypatch.setenv("OPENAI_BASE_URL", provider.base_url)
        result = as_run([agent("openai/gpt-4o-mini"), workflow(ASK)], Deployment())
        assert result.run.error["code"] == "model-host", result.run.error
        assert "endpoints=" in result.run.error["message"]
        assert provider.count == 0

    def test_a_redirect_of_an_endpoint_is_not_followed_elsewhere(self, foreign):
        with FakeHttp() as first:
            for status in (307, 308, 302):
                endpoint = Endpoint(
                    api_base=f"{first.url}/redirect/{status}?to={foreign.url}/echo&x=", api_key=KEY
                )
                deployment = Deployment.of(endpoints={"local": endpoint})
                result = run_workflow([agent("local/x"), workflow(ASK)], {}, deployment=deployment)
                assert result.run.error["code"] == "model-host", result.run.error
        assert foreign.calls == []

    def test_an_endpoint_without_a_key_gets_none_of_the_providers(self, provider):
        deployment = Deployment.of(endpoints={"local": Endpoint(api_base=provider.base_url)})
        assert run_workflow([agent("local/llama3"), workflow(ASK)], {}, deployment=deployment).succeeded
        [request] = provider.requests
        assert request.model == "llama3"
        assert KEY not in json.dumps(request.headers)

    @pytest.mark.parametrize(
        "reply",
        [
            {"text": f"your key is {KEY}, or {KEY.encode().hex()}"},
            {"status": 401, "message": f"bad key {KEY} " + "x" * 5000},
            {"status": 400, "message": f"bad key {KEY}"},
        ],
    )
    @pytest.mark.parametrize("written", ["plain", "variable", "header"])
    def test_a_key_that_a_server_repeats_is_redacted_and_its_text_cut(self, provider, capfd, reply, written):
        keys = {
            "plain": {"api_key": KEY},
            "variable": {"api_key": "{{ secret('OPENAI_API_KEY') }}"},
            "header": {"headers": {"Authorization": f"Bearer {KEY}"}},
        }
        provider.push(reply)
        endpoint = Endpoint(api_base=provider.base_url, **keys[written])
        deployment = Deployment.of(endpoints={"local": endpoint})
        result = run_workflow([agent("local/x"), workflow(ASK)], {}, deployment=deployment)
        assert provider.count == 1
        assert f"Bearer {KEY}" in provider.requests[0].headers["authorization"]
        assert KEY not in kept(result)
        assert KEY.encode().hex() not in kept(result)
        assert KEY not in repr(deployment)
        printed = capfd.readouterr()
        assert KEY not in printed.out + printed.err
        if result.run.error is not None:
            assert len(result.run.error["message"]) < 600

    def test_a_key_of_the_environment_is_redacted_wherever_it_comes_from(self, foreign):
        document = tool(f"{foreign.url}/json", method="GET", query={"value": json.dumps(f"it is {KEY}")})
        result = run_workflow([document, workflow(SEND)], {}, deployment=Deployment())
        assert result.succeeded
        assert KEY not in kept([*result.steps.values()] and result)


class TestMail:
    GATE: ClassVar = {"id": "gate", "type": "human", "config": {"title": "Pay?"}}

    def notified(self, **config):
        gate = {**self.GATE, "notify": [{"type": "email", "to": "ann@example.com", **config}]}
        document = workflow(gate)
        document["edges"][-1]["source_handle"] = "approved"
        return document

    @pytest.mark.parametrize(
        "config",
        [
            {"host": "127.0.0.1", "port": 6379},
            {"host": "169.254.169.254"},
            {"user": "a", "password": "{{ secret('CRM_TOKEN') }}"},
            {"tls": True},
        ],
    )
    def test_a_document_names_no_server(self, sqlite_url, config):
        deployment = Deployment.of(mail=MailServer(host="mail.example.com"), secrets=["CRM_TOKEN"])
        codes = refused_codes([self.notified(**config)], deployment, sqlite_url)
        assert codes == {"mail-server"}

    def test_no_secret_goes_by_mail(self, sqlite_url):
        deployment = Deployment.of(mail=MailServer(host="mail.example.com"), secrets=["CRM_TOKEN"])
        document = self.notified(subject="{{ secret('CRM_TOKEN') }}")
        assert refused_codes([document], deployment, sqlite_url) == {"secret-misplaced"}

    def test_without_a_server_it_cannot_be_published(self, sqlite_url):
        assert refused_codes([self.notified()], Deployment(), sqlite_url) == {"mail-unconfigured"}


class TestConfig:
    def test_a_value_is_read_and_kept_for_the_whole_run(self):
        ask = {"id": "gate", "type": "human", "config": {"title": "Sell in {{ config.region }}?"}}
        end = {"id": "end", "type": "end", "config": {"output": "{{ config.region }}"}}
        document = workflow(ask)
        document["nodes"][-1] = end
        document["edges"][-1]["source_handle"] = "approved"
        from agentmesh_dagster.testing import Answer

        values = {"region": "EU", "unused": 1}
        deployment = Deployment.of(config=values)

        def answer(wait):
            assert wait.title == "Sell in EU?"
            # The deployment says something else when the run goes on.
            deployment.config["region"] = "US"  # type: ignore[index]
            return Answer()

        result = run_workflow([document], {}, deployment=deployment, answers=answer)
        assert result.run.output == "EU"
        assert result.run.request_context == {"config": {"region": "EU"}}

    def test_a_value_that_is_not_there_is_named(self, sqlite_url):
        document = workflow({"id": "make", "type": "transform", "config": {"output": "{{ config.region }}"}})
        assert refused_codes([document], Deployment.of(config={"other": 1}), sqlite_url) == {"config-missing"}
        error = as_run([document], Deployment.of(config={"other": 1})).run.error
        assert "config" in error["message"]
        assert "region" in error["message"]


def test_answers_of_a_mail_server_are_not_quoted(monkeypatch):
    from test_notify import Mail, Table, World, a_notice, mail

    with FakeSmtp() as smtp:
        smtp.script(MAIL="550 the inside of your network: 10.0.0.7 root:x:0:0")
        table = Table(a_notice(mail(smtp)))
        World(table).deliver()
        monkeypatch.setattr(Mail, "server", None)
    error = table.rows["notice-1"].error
    assert "status 550" in error
    assert "root:x" not in error
