"""Holds every private Dagster name in use against the installed release, and names the one that moved.

A failure here means: this release of Dagster changed something that the orchestration relies on. Mend
`agentmesh_dagster/orchestration/*_internals.py` before the version range in pyproject.toml is widened.
"""

import ast
import importlib
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import dagster as dg
import pytest

PACKAGE = Path(__file__).parent.parent / "agentmesh_dagster"
INTERNALS = sorted(PACKAGE.rglob("*_internals.py"))
INSTALLED = f"dagster {version('dagster')}"

# What is called, with the arguments that are passed. A leading "*" stands for: passed by position.
CALLED = {
    "dagster._core.execution.api.ExecuteRunWithPlanIterable.__init__": [
        "execution_plan",
        "iterator",
        "execution_context_manager",
    ],
    "dagster._core.execution.context_creation_job.PlanExecutionContextManager.__init__": [
        "job",
        "execution_plan",
        "run_config",
        "dagster_run",
        "instance",
        "retry_mode",
        "raise_on_error",
        "output_capture",
        "step_dependency_config",
    ],
    "dagster._core.execution.plan.plan.ExecutionPlan.start": [
        "retry_mode",
        "max_concurrent",
        "instance_concurrency_context",
        "step_dependency_config",
    ],
    "dagster._core.execution.plan.active.ActiveExecution.get_steps_to_execute": ["limit"],
    "dagster._core.execution.plan.active.ActiveExecution.handle_event": ["*dagster_event"],
    "dagster._core.execution.plan.active.ActiveExecution.verify_complete": ["*job_context", "*step_key"],
    "dagster._core.execution.plan.active.ActiveExecution.plan_events_iterator": ["*job_context"],
    "dagster._core.execution.plan.active.ActiveExecution.concurrency_event_iterator": ["*plan_context"],
    "dagster._core.execution.plan.active.ActiveExecution.check_for_interrupts": [],
    "dagster._core.execution.plan.active.ActiveExecution.mark_interrupted": [],
    "dagster._core.execution.plan.active.ActiveExecution.get_known_state": [],
    "dagster._core.execution.plan.execute_plan.dagster_event_sequence_for_step": ["*step_context"],
    "dagster._core.execution.plan.execute_plan._trigger_hook": ["*step_context", "*step_event_list"],
    "dagster._core.execution.plan.instance_concurrency_context.InstanceConcurrencyContext.__init__": [
        "*instance",
        "*dagster_run",
    ],
    "dagster._core.execution.plan.instance_concurrency_context.InstanceConcurrencyContext.claim": [
        "*concurrency_key",
        "*step_key",
        "*step_priority",
    ],
    "dagster._core.execution.plan.instance_concurrency_context.InstanceConcurrencyContext.free_step": [
        "*step_key"
    ],
    "dagster._core.execution.plan.objects.StepFailureData.__new__": [
        "error",
        "user_failure_data",
        "error_source",
    ],
    "dagster._core.execution.context.system.PlanExecutionContext.for_step": ["*step", "*known_state"],
    "dagster._core.execution.compute_logs.create_compute_log_file_key": [],
    "dagster._core.execution.retries.get_retries_config": [],
    "dagster._core.events.EngineEventData.__new__": ["error"],
    "dagster._core.events.EngineEventData.in_process": ["*pid", "*step_keys_to_execute"],
    "dagster._core.events.EngineEventData.interrupted": ["*steps_interrupted"],
    "dagster._core.events.DagsterEvent.engine_event": ["*plan_context", "*message", "*event_specific_data"],
    "dagster._core.events.DagsterEvent.capture_logs": [
        "*job_context",
        "*step_keys",
        "*log_key",
        "*log_context",
    ],
    "dagster._core.events.DagsterEvent.step_failure_event": ["*step_context", "*step_failure_data"],
    "dagster._core.storage.compute_log_manager.CapturedLogContext.__new__": ["*log_key"],
    "dagster._core.storage.compute_log_manager.ComputeLogManager.capture_logs": ["*log_key"],
    "dagster._core.storage.compute_log_manager.ComputeLogManager.build_log_key_for_run": [
        "*run_id",
        "*step_key",
    ],
    "dagster._core.storage.local_compute_log_manager.LocalComputeLogManager.get_captured_local_path": [
        "*log_key",
        "*extension",
    ],
    "dagster._core.storage.local_compute_log_manager.LocalComputeLogManager.complete_artifact_path": [
        "*log_key"
    ],
    "dagster._core.storage.event_log.sql_event_log.SqlEventLogStorage._event_to_row": ["*event"],
    "dagster._core.storage.event_log.sqlite.sqlite_event_log.SqliteEventLogStorage.store_event": ["*event"],
    "dagster._core.storage.event_log.sqlite.sqlite_event_log.SqliteEventLogStorage.run_connection": [
        "*run_id"
    ],
    "dagster_postgres.event_log.event_log.PostgresEventLogStorage.store_event": ["*event"],
    "dagster_postgres.event_log.event_log.PostgresEventLogStorage.run_connection": ["*run_id"],
    "dagster._core.definitions.target.AutomationTarget.__new__": ["*resolvable_to_job"],
    "dagster._core.definitions.dependency.DynamicCollectDependencyDefinition.__new__": [
        "*node_name",
        "*output_name",
    ],
    "dagster._utils.ensure_file": ["*path"],
    "dagster._utils.touch_file": ["*path"],
    "dagster._utils.error.serializable_error_info_from_exc_info": ["*exc_info"],
    "dagster._core.launcher.base.CheckRunHealthResult.__new__": ["*status", "*msg", "run_worker_id"],
    "dagster._grpc.impl.core_execute_run": ["*recon_job", "*dagster_run", "*instance", "inject_env_vars"],
    "dagster._utils.hosted_user_process.recon_job_from_origin": ["*origin"],
    "dagster._utils.interrupts.capture_interrupts": [],
}

# What is read, or replaced on an object: a word that must stand in the source of the class or function.
READ = {
    "dagster._core.execution.context.system.PlanExecutionContext": ["_event_loop"],
    "dagster._core.execution.plan.compute.gen_from_async_gen": ["event_loop.run_until_complete("],
    "dagster._core.execution.plan.state.KnownExecutionState": ["ready_outputs"],
    "dagster._core.execution.plan.plan.ExecutionPlan": ["step_keys_to_execute"],
    "dagster._core.execution.context.system.StepExecutionContext": [
        "required_resource_keys",
        "def resources",
    ],
    "dagster._core.execution.plan.instance_concurrency_context.InstanceConcurrencyContext": [
        "_pending_timeouts"
    ],
    "dagster._core.log_manager.DagsterLogManager": ["self._dagster_handler"],
    "dagster._core.log_manager.DagsterLogHandler": ["def filter"],
    "dagster._core.storage.legacy_storage.LegacyEventLogStorage": [
        "self._storage.event_log_storage.store_event("
    ],
    "dagster._core.storage.event_log.sqlite.sqlite_event_log.SqliteEventLogStorage": ["conn.begin()"],
    "dagster_postgres.event_log.event_log.PostgresEventLogStorage": ['isolation_level="AUTOCOMMIT"'],
    "dagster._core.instance.methods.event_methods.EventMethods": [
        "self._event_storage_impl.store_event(",
        "def report_run_canceling",
    ],
    "dagster._core.storage.local_compute_log_manager.LocalComputeLogManager": [
        "touch_file(self.complete_artifact_path"
    ],
    # The gate sensor's targets are names.
    "dagster._core.definitions.sensor_definition.SensorDefinition": [
        "self._targets: Sequence[AutomationTarget]",
        "return self._targets",
    ],
    "dagster._core.definitions.sensor_definition.SensorEvaluationContext": ["def code_location_origin"],
    # It ends its ticks when the code server is asked to stop, and knows how long they may take.
    "dagster._grpc.server.DagsterGrpcServer.serve": [
        'name="grpc-server-termination"',
        "args=[self._server_termination_event,",
    ],
    "dagster._grpc.utils.default_sensor_grpc_timeout": ["DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS"],
    "dagster._grpc.utils.default_grpc_timeout": ["DAGSTER_GRPC_TIMEOUT_SECONDS"],
    "dagster._daemon.daemon.SensorDaemon": [
        'settings.get("use_threads")',
        'max_workers=settings.get("num_workers")',
    ],
    "dagster._core.launcher.base.RunLauncher": [
        "def launch_run(self, context",
        "def terminate(self, run_id",
        "def dispose(self)",
        "def join(self, timeout",
        "def supports_check_run_worker_health(self)",
        "def check_run_worker_health(self, run",
        "def get_run_worker_debug_info(",
    ],
    "dagster._core.definitions.reconstruct.ReconstructableJob": [
        # A worker loads its job ahead of `core_execute_run`, which then finds it.
        "@lru_cache(maxsize=1)\n    def get_definition",
        "def with_repository_load_data",
    ],
    "dagster._core.storage.dagster_run.DagsterRun": [
        "has_repository_load_data",
        "execution_plan_snapshot_id",
    ],
    "dagster_shared.utils.warnings.disable_dagster_warnings": ["if not _warnings_on.get()"],
    "dagster._core.execution.plan.execute_plan.inner_plan_execution_iterator": [
        # The executor's loop follows this function, step for step.
        "capture_logs(log_key)",
        "concurrency_event_iterator(",
        "required_resource_keys",
        "dagster_event_sequence_for_step(",
        "handle_event(",
        "verify_complete(",
        "plan_events_iterator(",
        "_trigger_hook(",
    ],
}


def resolve(path):
    """The object behind a dotted path, or a failure that names the part that is gone."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for i, part in enumerate(parts[cut:], cut):
            if not hasattr(found, part):
                pytest.fail(f"{INSTALLED} moved {path}: {'.'.join(parts[:i])} has no {part!r}", pytrace=False)
            found = getattr(found, part)
        return found
    return pytest.fail(f"{INSTALLED} moved {path}: no module {parts[0]!r}", pytrace=False)


def private_imports(path):
    """Dotted names that a file imports from inside Dagster."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and re.match(
            r"dagster\._|dagster_shared|dagster_\w+\._", node.module or ""
        ):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names if re.match(r"dagster\._|dagster_shared", a.name)}
    return names


@pytest.mark.parametrize("path", sorted(set().union(*map(private_imports, INTERNALS))))
def test_each_imported_private_name_exists(path):
    resolve(path)


@pytest.mark.parametrize("path", sorted(CALLED))
def test_each_called_private_name_takes_these_arguments(path):
    parameters = inspect.signature(resolve(path)).parameters
    takes = {name for name in parameters if name not in ("self", "cls", "_cls")}
    by_name = {argument for argument in CALLED[path] if not argument.startswith("*")}
    by_position = [argument[1:] for argument in CALLED[path] if argument.startswith("*")]
    in_order = [name for name in parameters if name in takes][: len(by_position)]
    assert by_name <= takes, f"{INSTALLED}: {path} no longer takes {sorted(by_name - takes)}"
    assert in_order == by_position, f"{INSTALLED}: {path} takes {in_order}, not {by_position}"
    required = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    missing = required - {"self", "cls", "_cls"} - by_name - set(by_position)
    assert not missing, f"{INSTALLED}: {path} now also requires {sorted(missing)}"


@pytest.mark.parametrize("path", sorted(READ))
def test_each_private_attribute_is_where_it_was(path):
    source = inspect.getsource(resolve(path))
    for word in READ[path]:
        assert word in source, f"{INSTALLED}: {path} no longer has {word!r}"


def test_no_other_module_imports_private_names():
    found = {
        str(p.relative_to(PACKAGE)): private_imports(p) for p in PACKAGE.rglob("*.py") if p not in INTERNALS
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_a_moved_name_is_named():
    with pytest.raises(
        pytest.fail.Exception, match=r"moved dagster._core.events.NoSuchEvent: dagster._core.events has no"
    ):
        resolve("dagster._core.events.NoSuchEvent")


def test_the_event_log_storage_of_an_instance_is_recognised(tmp_path):
    from agentmesh_dagster.orchestration.dagster_internals import event_log_storage, is_groupable

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        assert is_groupable(event_log_storage(instance))
    with dg.DagsterInstance.ephemeral() as instance:
        assert not is_groupable(event_log_storage(instance))
