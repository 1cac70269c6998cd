"""Benchmarks: AgentMesh against hand-written Dagster jobs, measured in the same run on the same machine."""
