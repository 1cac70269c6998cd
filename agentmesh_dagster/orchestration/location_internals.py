"""The private Dagster names of the code location, as `dagster_internals` holds those of the executor.

`tests/test_dagster_internals.py` says which one moved, when a Dagster release moves one.
"""

from __future__ import annotations

from pathlib import Path

import dagster as dg
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext, DefinitionsLoadType
from dagster._core.definitions.metadata.metadata_value import CodeLocationReconstructionMetadataValue
from dagster._core.definitions.reconstruct import ReconstructableJob, ReconstructableRepository
from dagster._core.definitions.repository_definition import RepositoryLoadData
from dagster._core.workspace.autodiscovery import loadable_targets_from_python_file

__all__ = ["ReconstructableJob", "hand_over", "handed_metadata", "reconstructable_from_file", "with_metadata"]


def handed_metadata(key: str) -> str | None:
    """The reconstruction metadata that the code server handed over; None where nobody did."""
    context = DefinitionsLoadContext.get()
    if context.load_type is DefinitionsLoadType.INITIALIZATION:
        return None
    value = context.reconstruction_metadata.get(key)
    return None if value is None else str(value)


def hand_over(metadata: dict[str, str]) -> RepositoryLoadData:
    """Lets the code locations that this process loads from now on get reconstruction metadata, as run workers do.

    Returns:
        The same for a `ReconstructableJob`, which hands it on to step processes.
    """
    load_data = RepositoryLoadData(
        reconstruction_metadata={
            key: CodeLocationReconstructionMetadataValue(value) for key, value in metadata.items()
        }
    )
    DefinitionsLoadContext.set(
        DefinitionsLoadContext(load_type=DefinitionsLoadType.RECONSTRUCTION, repository_load_data=load_data)
    )
    return load_data


def with_metadata(repository: dg.RepositoryDefinition, metadata: dict[str, str]) -> dg.RepositoryDefinition:
    """The repository with reconstruction metadata, which run workers and step processes get handed.

    On the repository itself: metadata added to the load context does not reach a run worker.
    """
    return repository.replace_repository_load_data(metadata, None)


def reconstructable_from_file(file: Path, job: str) -> ReconstructableJob:
    """A job of the only repository in a Python file, as `dagster job execute -f` finds it."""
    targets = loadable_targets_from_python_file(str(file), str(file.parent.parent))
    repository = ReconstructableRepository.for_file(str(file), targets[0].attribute, str(file.parent.parent))
    return repository.get_reconstructable_job(job)
